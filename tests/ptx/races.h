// Races by vector clocks: whether two accesses to a byte are ordered by what the program itself says.
//
// After FastTrack (Flanagan and Freund, PLDI 2009), with the order of the PTX memory model (PTX ISA, "Memory Consistency
// Model"): a thread's own order, barriers, and release patterns that acquire patterns observe.
//  * A relaxed, volatile or atomic access is strong; two strong ones of the same bytes, each in the scope of the other's
//    thread, do not race. All others of which one writes race unless they are ordered.
//  * A release pattern is a release, or a fence and a strong write after it by the same thread; it publishes what that
//    thread did, or had learnt, before the fence. An acquire pattern is an acquire, or a strong read and a fence after it.
//  * Reading a word passes on what all atomics since its last plain write have published. An atomic has observed those
//    before it: what is ordered after it is ordered after them.
//  * bar.sync orders a block, bar.warp.sync the warp's members; shuffles and votes order nothing.
// Left out, so that a program that needs it is reported: the order of all fence.sc among each other, a release of a word
// followed by a relaxed write of it, and what a strong load observes without a pattern. A word's publications are found by
// its first byte.

#include <algorithm>
#include <memory>
#include <unordered_map>
#include <vector>

typedef std::vector<uint32_t> Clock;             // of every thread of the launch
typedef std::shared_ptr<const Clock> Published;  // null: nothing

enum Strength { WEAK, STRONG, RELEASE, ACQUIRE, BOTH };
enum Scope { OF_BLOCK, OF_DEVICE, OF_SYSTEM };

static inline void join(Published& into, const Published& other) {
    if (!other || into == other) return;
    if (!into) {
        into = other;
        return;
    }
    auto both = std::make_shared<Clock>(*into);
    for (size_t i = 0; i < both->size(); ++i) (*both)[i] = std::max((*both)[i], (*other)[i]);
    into = both;
}

struct Epoch {
    uint32_t thread, clock, place;  // clock 0: none; the instruction
};

// The last accesses of one kind to a byte: one, or the last of each thread: in any order while they are few, then each
// at its thread's place.
struct Accesses {
    static constexpr size_t FEW = 32;
    Epoch last = {0, 0, 0};
    std::unique_ptr<std::vector<Epoch>> all;
};

struct Cell {
    Accesses read, written, strongly_read, strongly_written;
    uint32_t shape = 0;  // of the strong ones
};

struct Access {
    uint32_t thread, block, place;
    uint32_t first, most;  // the threads that can reach the byte: a block's, or all
    bool reads, writes;
    int strength, scope;
};

struct Location {  // where patterns meet
    Published device;
    std::vector<std::pair<uint32_t, Published>> blocks;

    Published& of(uint32_t block) {
        for (auto& one : blocks)
            if (one.first == block) return one.second;
        blocks.push_back({block, nullptr});
        return blocks.back().second;
    }
};

struct Causality {
    struct Thread {
        Published known;                            // of the others; shared with all who know the same
        uint32_t own = 1;
        Published released_device, released_block;  // by a fence, at the next strong write
        Published seen_device, seen_block;          // by strong reads, known at the next fence
    };

    uint32_t block_size;
    std::vector<Thread> threads;

    Causality(uint32_t blocks, uint32_t block_size) : block_size(block_size), threads(blocks * block_size) {
        const Published nothing = std::make_shared<const Clock>(threads.size());
        for (Thread& thread : threads) thread.known = nothing;
    }

    Published all_of(uint32_t id) const {
        auto all = std::make_shared<Clock>(*threads[id].known);
        (*all)[id] = threads[id].own;
        return all;
    }

    void fence(uint32_t id, int scope) {
        Thread& own = threads[id];
        join(own.known, own.seen_block);
        if (scope != OF_BLOCK) join(own.known, own.seen_device);
        own.released_block = all_of(id);
        if (scope != OF_BLOCK) own.released_device = own.released_block;
        ++own.own;
    }

    void meet(const std::vector<uint32_t>& members) {
        Published all;
        for (uint32_t id : members) join(all, threads[id].known);
        auto together = std::make_shared<Clock>(*all);
        for (uint32_t id : members) (*together)[id] = threads[id].own++;
        for (uint32_t id : members) threads[id].known = together;
    }

    // What a strong access learns and publishes, and that a weak write publishes nothing.
    void observe(const Access& access, std::unordered_map<Word, Location>& locations, Word address) {
        Thread& own = threads[access.thread];
        if (access.strength == WEAK) {
            if (access.writes && !locations.empty()) locations.erase(address);
            return;
        }
        const bool wide = access.scope != OF_BLOCK;
        if (access.reads) {
            auto found = locations.find(address);
            if (found != locations.end()) {
                Location& location = found->second;
                join(own.seen_block, location.of(access.block));
                if (wide) join(own.seen_device, location.device);
                if (access.strength == ACQUIRE || access.strength == BOTH) {
                    join(own.known, location.of(access.block));
                    if (wide) join(own.known, location.device);
                }
            }
        }
        if (!access.writes) return;
        Published to_block = own.released_block, to_device = own.released_device;
        if (access.strength == RELEASE || access.strength == BOTH) {
            to_block = all_of(access.thread);
            if (wide) to_device = to_block;
            ++own.own;
        }
        if (!access.reads) locations.erase(address);
        if (!to_block) return;
        Location& location = locations[address];
        join(location.of(access.block), to_block);
        if (wide) join(location.device, to_device);
    }

    bool before(const Epoch& one, uint32_t id) const {
        return one.thread == id || one.clock <= (*threads[id].known)[one.thread];
    }

    // The first of these accesses that is not ordered before the one at hand; those of one block may be exempt.
    Epoch unordered(const Accesses& made, const Access& access, int exempt) const {
        auto races = [&](const Epoch& one) {
            return one.clock && !before(one, access.thread) && (exempt < 0 || one.thread / block_size != (uint32_t)exempt);
        };
        if (!made.all) return races(made.last) ? made.last : Epoch{0, 0, 0};
        for (const Epoch& one : *made.all)
            if (races(one)) return one;
        return {0, 0, 0};
    }

    void note(Accesses& made, const Access& access) const {
        const Epoch now = {access.thread, threads[access.thread].own, access.place};
        if (!made.all) {
            if (!made.last.clock || made.last.thread == now.thread || before(made.last, access.thread)) {
                made.last = now;
                return;
            }
            made.all = std::make_unique<std::vector<Epoch>>(std::vector<Epoch>{made.last});
        }
        std::vector<Epoch>& all = *made.all;
        if (all.size() < access.most) {
            for (Epoch& one : all)
                if (one.thread == now.thread) {
                    one = now;
                    return;
                }
            all.push_back(now);
            if (all.size() <= Accesses::FEW && all.size() < access.most) return;
            std::vector<Epoch> placed(access.most, Epoch{0, 0, 0});
            for (const Epoch& one : all) placed[one.thread - access.first] = one;
            all = std::move(placed);
        } else {
            all[now.thread - access.first] = now;
        }
    }

    // The access that this one races with, clock 0 if none; this one becomes known to the byte. `shape` says which byte of how many.
    Epoch touch(Cell& cell, const Access& access, uint32_t shape) const {
        const bool weak = access.strength == WEAK;
        Epoch other = unordered(cell.written, access, -1);
        if (!other.clock && access.writes) other = unordered(cell.read, access, -1);
        if (!other.clock) {
            // strong ones of another shape, or out of each other's scope, are as weak ones
            const uint32_t own_shape = shape << 2 | access.scope;
            const bool alike = !weak && (!cell.shape || cell.shape >> 2 == shape);
            const bool narrow = access.scope == OF_BLOCK || (cell.shape & 3) == OF_BLOCK;
            // an atomic has observed the strong writes before it: whatever comes after it comes after them
            const bool observes = alike && !narrow && access.reads && access.writes;
            if (!alike || narrow) {
                const int exempt = alike ? (int)access.block : -1;
                other = unordered(cell.strongly_written, access, exempt);
                if (!other.clock && access.writes) other = unordered(cell.strongly_read, access, exempt);
            }
            if (observes) cell.strongly_written = Accesses();
            if (!weak) cell.shape = own_shape;
        }
        if (access.reads && !access.writes) note(weak ? cell.read : cell.strongly_read, access);
        if (access.writes) {
            // what is ordered before this write needs not be known any longer
            if (!other.clock && weak) cell = Cell();
            note(weak ? cell.written : cell.strongly_written, access);
        }
        return other;
    }
};

// The cells of some memory, made where it is touched.
struct Cells {
    static constexpr Word PAGE = 256;
    std::vector<std::unique_ptr<Cell[]>> pages;

    Cell& at(Word place) {
        if (pages.size() <= place / PAGE) pages.resize(place / PAGE + 1);
        auto& page = pages[place / PAGE];
        if (!page) page.reset(new Cell[PAGE]);
        return page[place % PAGE];
    }
};
