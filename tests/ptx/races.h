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
//  * Scopes: a block, the blocks of a rank, all ranks. A rank's launches are ordered one after another.
//  * A write through one proxy is there for another, a second address of the same bytes say, only after a proxy fence
//    that comes after the write and before the access. Accesses that synchronize are taken out: they are not data.
// Left out, so that a program that needs it is reported: the order of all fence.sc among each other, a release of a word
// followed by a relaxed write of it, and what a strong load observes without a pattern. A word's publications are found by
// its first byte. Left out, so that a program that lacks it passes: a proxy fence between a read and a later write.

#include <algorithm>
#include <memory>
#include <unordered_map>
#include <vector>

// Of every thread of all ranks what is known of it; where there are proxies, behind it what of that a proxy fence has made
// visible to all of them.
typedef std::vector<uint32_t> Clock;
typedef std::shared_ptr<const Clock> Published;  // null: nothing

enum Strength { WEAK, STRONG, RELEASE, ACQUIRE, BOTH };
enum Scope { OF_BLOCK, OF_DEVICE, OF_SYSTEM, SCOPES };
enum Proxy { ANY, MULTICAST, READ_ONLY_CACHE, FIRST_ADDRESS, MOST_PROXIES = 15 };

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
    uint32_t thread, clock;  // clock 0: none
    uint32_t place : 26, scope : 2, proxy : 4;  // the instruction, among those of all launches
};

// The last accesses of one kind to a byte: one, or the last of each thread: in any order while they are few, then each
// at its thread's place.
struct Accesses {
    static constexpr size_t FEW = 32;
    Epoch last = {};
    std::unique_ptr<std::vector<Epoch>> all;

    Accesses() = default;
    Accesses(Accesses&&) = default;
    Accesses& operator=(Accesses&&) = default;
    Accesses(const Accesses& other)
        : last(other.last), all(other.all ? std::make_unique<std::vector<Epoch>>(*other.all) : nullptr) {}
};

struct Cell {
    Accesses read, written, strongly_read, strongly_written;
    uint32_t shape = 0;  // of the strong ones: first byte, bytes, the narrowest scope
};

struct Access {
    uint32_t thread, block, rank, place;
    uint32_t first, most;  // the threads that can reach the byte: a block's, or all
    bool reads, writes;
    int strength, scope, proxy;
};

// What an access runs into: nothing, a race, or a write through another proxy.
struct Conflict {
    Epoch other;
    bool proxy;
};

// What a strong write passes on, and to whom: its own block, its rank, everyone.
struct Publication {
    struct To {
        uint32_t scope, who;
        Published what;
    };
    std::vector<To> all;

    void add(uint32_t scope, uint32_t who, const Published& what) {
        if (!what) return;
        for (To& one : all)
            if (one.scope == scope && one.who == who) return join(one.what, what);
        all.push_back({scope, who, what});
    }
    void add(const Publication& other) {
        for (const To& one : other.all) add(one.scope, one.who, one.what);
    }
};

struct Causality {
    struct Thread {
        Published known;                // of the others; shared with all who know the same
        uint32_t own = 1;
        uint32_t block = 0, rank = 0;
        Published released[SCOPES];     // by a fence, at the next strong write
        Published seen[SCOPES];         // by strong reads, known at the next fence
    };

    std::vector<Thread> threads;
    const int widest;     // of a single rank a device is the system
    const bool proxies;

    Causality(uint32_t count, bool ranks, bool proxies)
        : threads(count), widest(ranks ? OF_SYSTEM : OF_DEVICE), proxies(proxies) {
        const Published nothing = std::make_shared<const Clock>(proxies ? 2 * count : count);
        for (Thread& thread : threads) thread.known = nothing;
    }

    Published all_of(uint32_t id) const {
        auto all = std::make_shared<Clock>(*threads[id].known);
        (*all)[id] = threads[id].own;
        return all;
    }

    void fence(uint32_t id, int scope) {
        Thread& own = threads[id];
        scope = std::min(scope, widest);
        for (int s = 0; s <= scope; ++s) join(own.known, own.seen[s]);
        const Published all = all_of(id);
        for (int s = 0; s <= scope; ++s) own.released[s] = all;
        ++own.own;
    }

    void fence_proxies(uint32_t id) {
        if (!proxies) return;
        auto all = std::make_shared<Clock>(*all_of(id));
        std::copy_n(all->begin(), threads.size(), all->begin() + threads.size());
        threads[id].known = all;
        ++threads[id].own;
    }

    void meet(const std::vector<uint32_t>& members) {
        Published all;
        for (uint32_t id : members) join(all, threads[id].known);
        auto together = std::make_shared<Clock>(*all);
        for (uint32_t id : members) (*together)[id] = threads[id].own++;
        for (uint32_t id : members) threads[id].known = together;
    }

    // A rank's threads have ended, and those of its next launch begin in their places.
    void begin_again(uint32_t first, uint32_t count) {
        std::vector<uint32_t> members(count);
        for (uint32_t k = 0; k < count; ++k) {
            members[k] = first + k;
            for (Published& seen : threads[first + k].seen) join(threads[first + k].known, seen);
        }
        meet(members);
        fence_proxies(first);
        for (uint32_t id : members) {
            threads[id].known = threads[first].known;
            for (Published& released : threads[id].released) released = nullptr;
        }
    }

    void learn(const Access& access, const Publication& from) {
        Thread& own = threads[access.thread];
        const int scope = std::min(access.scope, widest);
        for (const auto& one : from.all) {
            const uint32_t me = one.scope == OF_BLOCK ? access.block : one.scope == OF_DEVICE ? access.rank : 0;
            if ((int)one.scope > scope || one.who != me) continue;
            join(own.seen[one.scope], one.what);
            if (access.strength == ACQUIRE || access.strength == BOTH) join(own.known, one.what);
        }
    }

    // What a strong write passes on.
    Publication publish(const Access& access) {
        Thread& own = threads[access.thread];
        const int scope = std::min(access.scope, widest);
        const bool releases = access.strength == RELEASE || access.strength == BOTH;
        Publication made;
        const Published all = releases ? all_of(access.thread) : nullptr;
        for (int s = 0; s <= scope; ++s)
            made.add(s, s == OF_BLOCK ? access.block : s == OF_DEVICE ? access.rank : 0, all ? all : own.released[s]);
        if (releases) ++own.own;
        return made;
    }

    // What a strong access learns and publishes, and that a weak write publishes nothing, where stores are seen at once.
    void observe(const Access& access, std::unordered_map<Word, Publication>& locations, Word address) {
        if (access.strength == WEAK) {
            if (access.writes && !locations.empty()) locations.erase(address);
            return;
        }
        if (access.reads) {
            auto found = locations.find(address);
            if (found != locations.end()) learn(access, found->second);
        }
        if (!access.writes) return;
        const Publication made = publish(access);
        if (!access.reads) locations.erase(address);
        if (!made.all.empty()) locations[address].add(made);
    }

    bool before(uint32_t thread, uint32_t clock, uint32_t id) const {
        return thread == id || clock <= (*threads[id].known)[thread];
    }

    // Whether two strong accesses are in each other's scope.
    bool mutual(const Epoch& one, const Access& access) const {
        const Thread& other = threads[one.thread];
        const int needed = other.rank != access.rank ? OF_SYSTEM : other.block != access.block ? OF_DEVICE : OF_BLOCK;
        return (int)one.scope >= needed && access.scope >= needed;
    }

    // Whether a write came through another proxy, and no proxy fence after it that this access knows of.
    bool elsewhere(const Epoch& one, const Access& access) const {
        if (one.proxy == ANY || access.proxy == ANY || one.proxy == (uint32_t)access.proxy) return false;
        const bool addresses = one.proxy >= FIRST_ADDRESS && access.proxy >= FIRST_ADDRESS;
        if (addresses && threads[one.thread].rank != access.rank) return false;
        return (*threads[access.thread].known)[threads.size() + one.thread] < one.clock;
    }

    // The first of these accesses that this one conflicts with; those that it is strong with may race.
    Conflict conflict(const Accesses& made, const Access& access, bool alike, bool writes) const {
        auto conflicts = [&](const Epoch& one, bool& proxy) {
            if (!one.clock) return false;
            if (!before(one.thread, one.clock, access.thread)) return proxy = false, !(alike && mutual(one, access));
            return proxy = proxies && writes && elsewhere(one, access);
        };
        bool proxy = false;
        if (!made.all) return conflicts(made.last, proxy) ? Conflict{made.last, proxy} : Conflict{};
        for (const Epoch& one : *made.all)
            if (conflicts(one, proxy)) return {one, proxy};
        return {};
    }

    void note(Accesses& made, const Access& access) const {
        const Epoch now = {access.thread, threads[access.thread].own, access.place, (uint32_t)access.scope,
                           (uint32_t)access.proxy};
        if (!made.all) {
            const Epoch& last = made.last;
            if (!last.clock || last.thread == now.thread || before(last.thread, last.clock, access.thread)) {
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
            std::vector<Epoch> placed(access.most, Epoch{});
            for (const Epoch& one : all) placed[one.thread - access.first] = one;
            all = std::move(placed);
        } else {
            all[now.thread - access.first] = now;
        }
    }

    // What this access conflicts with, clock 0 if nothing; it becomes known to the byte. `shape` says which byte of how many.
    Conflict touch(Cell& cell, const Access& access, uint32_t shape) const {
        const bool weak = access.strength == WEAK;
        Conflict found = conflict(cell.written, access, false, true);
        if (!found.other.clock && access.writes) found = conflict(cell.read, access, false, false);
        if (!found.other.clock) {
            // strong ones of another shape, or out of each other's scope, are as weak ones
            const bool same = cell.shape >> 2 == shape, alike = !weak && (!cell.shape || same);
            const int scope = same ? std::min(access.scope, (int)(cell.shape & 3)) : access.scope;
            if (!alike || scope < widest || proxies) {
                found = conflict(cell.strongly_written, access, alike, true);
                if (!found.other.clock && access.writes)
                    found = conflict(cell.strongly_read, access, alike, false);
            }
            // an atomic has observed the strong writes before it: whatever comes after it comes after them
            if (!found.other.clock && alike && access.reads && access.writes) cell.strongly_written = Accesses();
            if (!weak) cell.shape = shape << 2 | scope;
        }
        if (access.reads && !access.writes) note(weak ? cell.read : cell.strongly_read, access);
        if (access.writes) {
            // what is ordered before this write needs not be known any longer
            if (!found.other.clock && weak) cell = Cell();
            note(weak ? cell.written : cell.strongly_written, access);
        }
        return found;
    }
};

// The cells of some memory, made where it is touched: one for each byte, or for as many as all accesses nearby have taken
// at once.
struct Cells {
    static constexpr Word PAGE = 256;
    struct Page {
        uint32_t bytes;  // of a cell
        std::vector<Cell> cells;
    };
    std::vector<std::unique_ptr<Page>> pages;

    // The page of a byte, where no cell holds bytes of two elements of this size that begins there.
    Page& page(Word place, Word size) {
        if (pages.size() <= place / PAGE) pages.resize(place / PAGE + 1);
        auto& page = pages[place / PAGE];
        const uint32_t bytes = (place | size) & (0 - (place | size));
        if (!page) page.reset(new Page{bytes, std::vector<Cell>(PAGE / bytes)});
        if (page->bytes > bytes) split(*page, bytes);
        return *page;
    }

    static void split(Page& page, uint32_t bytes) {
        std::vector<Cell> parts;
        parts.reserve(PAGE / bytes);
        for (const Cell& cell : page.cells)
            for (uint32_t first = 0; first < page.bytes; first += bytes) {
                parts.push_back(cell);
                if (cell.shape) parts.back().shape += first << 7;  // of another byte of the element
            }
        page = {bytes, std::move(parts)};
    }
};
