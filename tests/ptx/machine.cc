// Runs a PTX kernel: one state machine per thread, all threads of all blocks, in an order that a seed gives.
//
// A checked launch knows the arrays, each at an address of its own with a gap before the next, and stops at the first
// access outside of them, unaligned, of memory that nobody has written, or that races with another (races.h), and where
// threads wait for what never comes. An unchecked one takes addresses as they are, blocks one after another.
// Loads see the last store that was run: stores do not come late, so what a weaker order could show is left to races.h.

#include <cstddef>

#include "operations.h"
#include "races.h"

enum Kind { COMPUTE, BRANCH, END, LOAD, STORE, ATOMIC, FENCE, BARRIER, WARP_BARRIER, SHUFFLE, VOTE, PARAMETER,
            WHERE_SHARED, WHERE_GLOBAL, NOTHING };
enum Space { GLOBAL, SHARED, GENERIC };
enum Problem { NONE, OUTSIDE, READ_ONLY, UNALIGNED, UNWRITTEN, RACE, DIVERGED, LANE_MISSING, NOT_IN_MASK, BARRIER_MISSING,
               ENDLESS };

static constexpr Word SHARED_WINDOW = 1ull << 56;  // where generic addresses of shared memory begin
static constexpr Word POISON = 0xa5a5a5a5a5a5a5a5ull;

struct Range {
    Word base, size;
    uint8_t* host;
    uint8_t* written;  // a byte for each, or null: all are
    int64_t writable;
};

struct Special {
    int32_t place, which;
};

struct Constant {
    int64_t place;
    Word value;
};

struct Launch {
    const Instruction* code;
    const Constant* constants;
    const Special* specials;
    const uint8_t* parameters;
    const Range* arrays;
    const Range* variables;  // of shared memory
    int32_t instructions, registers, constant_count, special_count, array_count, variable_count, shared_bytes;
    int32_t blocks, block_size, checked;
    int64_t seed, most_steps;  // seed -1, -2: first or last thread and block first
};

struct Fault {
    int32_t problem, place, block, thread, writes, bytes, array, other_block, other_thread, other_place;
    Word address, steps;
};

// ---- names of what a program may use

typedef Word (*Combine)(Word old, Word a, Word b);

struct Atomic {
    const char* name;
    Combine combine;
};

#define ATOMIC(NAME, T, VALUE)                                                             \
    {NAME, [](Word before, Word first, Word second) -> Word {                              \
         const T old = get<T>(&before, 0), a = get<T>(&first, 0), b = get<T>(&second, 0);  \
         (void)old, (void)a, (void)b;                                                      \
         Word made = 0;                                                                    \
         set<T>(&made, 0, (T)(VALUE));                                                     \
         return made;                                                                      \
     }},
#define ATOMIC_NUMBER(N, T) \
    ATOMIC("add." N, T, old + a) ATOMIC("min." N, T, a < old ? a : old) ATOMIC("max." N, T, a > old ? a : old)
#define ATOMIC_BITS(N, T)                                                                       \
    ATOMIC("exch." N, T, a) ATOMIC("cas." N, T, old == a ? b : old) ATOMIC("and." N, T, old & a) \
    ATOMIC("or." N, T, old | a) ATOMIC("xor." N, T, old ^ a)

static const Atomic ATOMICS[] = {
    ATOMIC_NUMBER("u32", uint32_t) ATOMIC_NUMBER("s32", int32_t) ATOMIC_NUMBER("u64", uint64_t)
    ATOMIC_NUMBER("s64", int64_t) ATOMIC_BITS("b32", uint32_t) ATOMIC_BITS("b64", uint64_t)
    ATOMIC("inc.u32", uint32_t, old >= a ? 0 : old + 1) ATOMIC("dec.u32", uint32_t, old == 0 || old > a ? a : old - 1)
    ATOMIC("add.f32", float, flushed(canonical(flushed(old) + flushed(a)))) ATOMIC("add.f64", double, old + a)
};

static const char* const SPECIALS[] = {
    "%tid.x", "%tid.y", "%tid.z", "%ntid.x", "%ntid.y", "%ntid.z", "%ctaid.x", "%ctaid.y", "%ctaid.z",
    "%nctaid.x", "%nctaid.y", "%nctaid.z", "%laneid", "%lanemask_eq", "%lanemask_lt", "%lanemask_le",
    "%lanemask_gt", "%lanemask_ge",
};

static Word special(int which, Word thread, Word block, const Launch& launch) {
    const uint32_t lane = thread % 32, bit = 1u << lane;
    switch (which) {
        case 0: return thread;
        case 3: return launch.block_size;
        case 6: return block;
        case 9: return launch.blocks;
        case 4: case 5: case 10: case 11: return 1;
        case 12: return lane;
        case 13: return bit;
        case 14: return bit - 1;
        case 15: return bit | (bit - 1);
        case 16: return ~(bit | (bit - 1));
        case 17: return ~(bit - 1);
    }
    return 0;  // y and z
}

template <class Table>
static int place_of(const Table& table, const char* name) {
    int place = 0;
    for (const auto& one : table) {
        if (!std::strcmp(one.name, name)) return place;
        ++place;
    }
    return -1;
}

// ---- threads

enum State { READY, AT_WARP, AT_BARRIER, ENDED };

struct Thread {
    Word* registers;
    uint32_t pc, number, mask, barrier;
    State state;
};

struct Block {
    uint32_t index, ended = 0;
    std::vector<Word> registers;
    Word* free;                // registers that no thread has had
    std::vector<Word*> left;   // those of threads that have ended
    std::vector<uint8_t> shared, written;
    std::vector<Thread> threads;
    Cells cells;
    std::unordered_map<Word, Location> locations;
};

struct Random {
    Word state;
    Word next() {  // splitmix64
        Word z = state += 0x9e3779b97f4a7c15ull;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
        z = (z ^ z >> 27) * 0x94d049bb133111ebull;
        return z ^ z >> 31;
    }
    uint32_t below(uint32_t end) { return (uint32_t)((next() >> 32) * end >> 32); }
};

struct alignas(64) Decoded {
    Compute compute;
    Instruction i;
};

// Adds the steps that were made, however a run ends.
struct Counted {
    Word& total;
    const Word before;
    const Word& left;
    ~Counted() { total += before - left; }
};

template <bool CHECKED>
struct Machine {
    const Launch& launch;
    Fault& fault;
    std::vector<Decoded> code;
    std::unique_ptr<Causality> causality;
    std::vector<Cells> cells;  // of the arrays
    std::unordered_map<Word, Location> locations;
    std::vector<int> recent;   // the array that an instruction touched last

    Machine(const Launch& launch, Fault& fault) : launch(launch), fault(fault) {
        for (int k = 0; k < launch.instructions; ++k) {
            const Instruction& i = launch.code[k];
            code.push_back({i.kind == COMPUTE ? OPERATIONS[i.operation].compute : nullptr, i});
        }
        if (CHECKED) {
            causality = std::make_unique<Causality>(launch.blocks, launch.block_size);
            cells.resize(launch.array_count);
            recent.resize(launch.instructions);
        }
    }

    bool fail(int problem, const Instruction& i, const Block& block, const Thread& thread, Word address = 0,
              int bytes = 0) {
        fault.problem = problem, fault.place = i.place;
        fault.block = block.index, fault.thread = thread.number;
        fault.address = address, fault.bytes = bytes, fault.writes = i.writes;
        return false;
    }

    void start(Block& block, uint32_t index) {
        block.index = index, block.ended = 0;
        block.left.clear();
        const size_t size = launch.block_size;
        block.registers.resize(size * launch.registers);
        block.threads.resize(size);
        block.shared.assign(launch.shared_bytes, (uint8_t)POISON);
        if (CHECKED) {
            block.written.assign(launch.shared_bytes, 0);
            block.cells.pages.clear();
            block.locations.clear();
        }
        for (uint32_t t = 0; t < size; ++t) block.threads[t] = {nullptr, 0, t, 0, 0, READY};
        block.free = block.registers.data();
    }

    // A thread's registers are those of one that has ended, if there is one: then they are in the cache.
    void give_registers(Block& block, Thread& thread) {
        if (block.left.empty()) {
            thread.registers = block.free;
            block.free += launch.registers;
        } else {
            thread.registers = block.left.back();
            block.left.pop_back();
        }
        Word* const own = thread.registers;
        if (CHECKED) std::fill(own, own + launch.registers, POISON);
        for (int i = 0; i < launch.constant_count; ++i) own[launch.constants[i].place] = launch.constants[i].value;
        for (int i = 0; i < launch.special_count; ++i)
            own[launch.specials[i].place] = special(launch.specials[i].which, thread.number, block.index, launch);
    }

    // ---- memory

    // Where some bytes are on the host; null after a fault.
    uint8_t* reach(Block& block, Thread& thread, const Instruction& i, Word address, bool by_element) {
        const Word bytes = (Word)i.size * i.count;
        bool shared = i.space == SHARED;
        if (i.space == GENERIC && address - SHARED_WINDOW < SHARED_WINDOW) shared = true, address -= SHARED_WINDOW;
        if (!CHECKED) return shared ? block.shared.data() + address : (uint8_t*)address;
        if (address % bytes) return fail(UNALIGNED, i, block, thread, address, bytes), nullptr;
        int found = -1;
        const Range* ranges = shared ? launch.variables : launch.arrays;
        const int count = shared ? launch.variable_count : launch.array_count;
        int& hint = recent[thread.pc];
        for (int k = 0, at = hint; k < count && found < 0; ++k, at = at + 1 < count ? at + 1 : 0)
            if (at < count && address >= ranges[at].base && address - ranges[at].base < ranges[at].size) found = at;
        fault.array = shared ? -2 - found : found;
        if (found < 0 || address - ranges[found].base + bytes > ranges[found].size) {
            if (found < 0) fault.array = shared ? -1 : nearest(address);
            return fail(OUTSIDE, i, block, thread, address, bytes), nullptr;
        }
        hint = found;
        const Range& range = ranges[found];
        const Word place = address - range.base;
        if (i.writes && !range.writable) return fail(READ_ONLY, i, block, thread, address, bytes), nullptr;
        uint8_t* written = shared ? &block.written[address] : range.written ? range.written + place : nullptr;
        if (written) {
            if (i.reads)
                for (Word b = 0; b < bytes; ++b)
                    if (!written[b]) return fail(UNWRITTEN, i, block, thread, address + b, bytes), nullptr;
            if (i.writes) std::memset(written, 1, bytes);
        }
        if (range.writable) {
            Cells& own = shared ? block.cells : cells[found];
            const Word first = shared ? address : place;
            const uint32_t number = block.index * launch.block_size + thread.number;
            const uint32_t size = launch.block_size, begin = shared ? block.index * size : 0;
            const Access access = {number, block.index, (uint32_t)i.place, begin, shared ? size : launch.blocks * size,
                                   i.reads != 0, i.writes != 0, i.strength, i.scope};
            const uint32_t whole = by_element ? i.size : bytes;
            for (Word b = 0; b < bytes; ++b) {
                const Epoch other = causality->touch(own.at(first + b), access, (uint32_t)(b % whole) << 5 | whole);
                if (other.clock) {
                    fault.other_block = other.thread / launch.block_size;
                    fault.other_thread = other.thread % launch.block_size;
                    fault.other_place = other.place;
                    return fail(RACE, i, block, thread, address + b, bytes), nullptr;
                }
            }
            for (Word b = 0; b < bytes; b += whole)
                causality->observe(access, shared ? block.locations : locations, address + b);
        }
        return shared ? block.shared.data() + address : range.host + place;
    }

    // The array that ends last before an address.
    int nearest(Word address) const {
        int best = -1;
        for (int k = 0; k < launch.array_count; ++k)
            if (launch.arrays[k].base <= address && (best < 0 || launch.arrays[k].base > launch.arrays[best].base)) best = k;
        return best;
    }

    static Word loaded(const uint8_t* from, const Instruction& i) {
        Word value = 0;
        std::memcpy(&value, from, i.size);
        if (i.extends && i.size < 8) {
            const int rest = 64 - 8 * i.size;
            value = (Word)((int64_t)(value << rest) >> rest);
        }
        return value;
    }

    // ---- waiting for each other

    // The warp operation of a thread, if all lanes of its mask have come to it.
    bool together(Block& block, Thread& thread) {
        const uint32_t first = thread.number / 32 * 32;
        for (uint32_t lane = 0; lane < 32; ++lane) {
            if (!(thread.mask >> lane & 1)) continue;
            if (first + lane >= block.threads.size()) return false;
            const Thread& other = block.threads[first + lane];
            if (other.state != AT_WARP || other.pc != thread.pc || other.mask != thread.mask) return false;
        }
        return true;
    }

    bool warp_operation(Block& block, Thread& thread, const Instruction& i) {
        const uint32_t first = thread.number / 32 * 32, mask = thread.mask;
        Thread* lanes = &block.threads[first];
        Word result[32];
        bool holds[32];
        uint32_t ballot = 0;
        std::vector<uint32_t> members;
        for (uint32_t lane = 0; lane < 32; ++lane) {
            if (!(mask >> lane & 1)) continue;
            Word* own = lanes[lane].registers;
            members.push_back(block.index * launch.block_size + first + lane);
            if (i.kind == VOTE && get<bool>(own, i.s[0]) != (bool)i.extends) ballot |= 1u << lane;
            if (i.kind != SHUFFLE) continue;
            const int b = (int)(own[i.s[1]] & 31), c = (int)own[i.s[2]];
            const int segment = c >> 8 & 31, clamp = c & 31, me = lane;
            const int most = (me & segment) | (clamp & ~segment);
            int from = i.operation == 0 ? me - b : i.operation == 1 ? me + b : i.operation == 2 ? me ^ b
                                                                              : (me & segment) | (b & ~segment);
            holds[lane] = i.operation == 0 ? from >= most : from <= most;
            if (!holds[lane]) from = me;
            if (!(mask >> from & 1)) return fail(NOT_IN_MASK, i, block, lanes[lane]);
            result[lane] = (uint32_t)lanes[from].registers[i.s[0]];
        }
        for (uint32_t lane = 0; lane < 32; ++lane) {
            if (!(mask >> lane & 1)) continue;
            Thread& own = lanes[lane];
            if (i.kind == SHUFFLE) own.registers[i.d[0]] = result[lane], own.registers[i.d[1]] = holds[lane];
            if (i.kind == VOTE) {
                const uint32_t none = 0;
                own.registers[i.d[0]] = i.operation == 0   ? ballot
                                        : i.operation == 1 ? ballot == mask
                                        : i.operation == 2 ? ballot != none
                                                           : ballot == mask || ballot == none;
            }
            ++own.pc;
            make_ready(block, own);
        }
        if (CHECKED && i.kind == WARP_BARRIER) causality->meet(members);
        return true;
    }

    bool barrier(Block& block, Thread& thread, const Instruction& i) {
        const size_t expected = i.s[1] >= 0 ? (uint32_t)thread.registers[i.s[1]] : block.threads.size();
        std::vector<Thread*> here;
        for (Thread& other : block.threads)
            if (other.state == AT_BARRIER && other.barrier == thread.barrier) here.push_back(&other);
        if (here.size() < expected) return true;
        std::vector<uint32_t> members;
        for (size_t k = 0; k < here.size(); ++k) {
            const Thread& own = *here[k];
            members.push_back(block.index * launch.block_size + own.number);
            if (k && i.extends && own.number / 32 == here[k - 1]->number / 32 && own.pc != here[k - 1]->pc) {
                fault.other_block = block.index, fault.other_thread = here[k - 1]->number;
                fault.other_place = (int)here[k - 1]->pc;
                return fail(DIVERGED, launch.code[own.pc], block, own);
            }
        }
        if (CHECKED) causality->meet(members);
        released = &block;
        for (Thread* own : here) {
            ++own->pc;
            make_ready(block, *own);
        }
        return true;
    }

    // Threads that wait while none can go on: for whom?
    bool stuck(Block& block) {
        for (int problem : {LANE_MISSING, BARRIER_MISSING})
            for (Thread& own : block.threads) {
                if (own.state != (problem == LANE_MISSING ? AT_WARP : AT_BARRIER)) continue;
                const uint32_t first = own.number / 32 * 32;
                for (Thread& other : block.threads) {
                    const bool same = problem == LANE_MISSING ? other.pc == own.pc && other.mask == own.mask
                                                              : other.barrier == own.barrier;
                    if (problem == LANE_MISSING &&
                        (other.number / 32 != own.number / 32 || !(own.mask >> (other.number - first) & 1)))
                        continue;
                    if (other.state == own.state && same) continue;
                    fault.other_block = block.index, fault.other_thread = other.number;
                    fault.other_place = other.state == ENDED ? -1 : (int)other.pc;
                    return fail(problem, launch.code[own.pc], block, own);
                }
                fault.other_place = -2;  // a lane or thread that the block does not have
                return fail(problem, launch.code[own.pc], block, own);
            }
        return true;
    }

    // ---- instructions

    // Run a thread for some steps, or until it waits or ends; false after a fault.
    bool run(Block& block, Thread& thread, Word steps) {
        if (!thread.registers) give_registers(block, thread);
        Word* const r = thread.registers;
        const Counted counted = {fault.steps, steps, steps};
        for (; steps; --steps) {
            const Decoded& decoded = code[thread.pc];
            const Instruction& i = decoded.i;
            if (i.guard >= 0 && (bool)r[i.guard] == (bool)i.negated) {
                ++thread.pc;
                continue;
            }
            switch (i.kind) {
                case COMPUTE:
                    decoded.compute(r, i);
                    break;
                case BRANCH:
                    thread.pc = i.target;
                    continue;
                case END:
                    thread.state = ENDED;
                    ++block.ended;
                    block.left.push_back(r);
                    unmake_ready(block, thread);
                    return true;
                case PARAMETER:
                    for (int k = 0; k < i.count; ++k) r[i.d[k]] = loaded(launch.parameters + i.offset + k * i.size, i);
                    break;
                case LOAD: {
                    const uint8_t* from = reach(block, thread, i, r[i.s[0]] + i.offset, true);
                    if (CHECKED && !from) return false;
                    for (int k = 0; k < i.count; ++k) r[i.d[k]] = loaded(from + k * i.size, i);
                    break;
                }
                case STORE: {
                    uint8_t* to = reach(block, thread, i, r[i.d[0]] + i.offset, true);
                    if (CHECKED && !to) return false;
                    for (int k = 0; k < i.count; ++k) std::memcpy(to + k * i.size, r + i.s[k], i.size);
                    break;
                }
                case ATOMIC: {
                    uint8_t* at = reach(block, thread, i, r[i.s[0]] + i.offset, false);
                    if (CHECKED && !at) return false;
                    const Word before = loaded(at, i);
                    const Word after = ATOMICS[i.operation].combine(before, r[i.s[1]], r[i.s[2]]);
                    std::memcpy(at, &after, i.size);
                    r[i.d[0]] = before;
                    break;
                }
                case FENCE:
                    if (CHECKED) causality->fence(block.index * launch.block_size + thread.number, i.scope);
                    break;
                case BARRIER:
                    thread.state = AT_BARRIER;
                    thread.barrier = (uint32_t)r[i.s[0]];
                    unmake_ready(block, thread);
                    return barrier(block, thread, i);
                case WARP_BARRIER:
                case SHUFFLE:
                case VOTE:
                    thread.state = AT_WARP;
                    thread.mask = (uint32_t)r[i.s[3]];
                    unmake_ready(block, thread);
                    if (!(thread.mask >> thread.number % 32 & 1)) return fail(NOT_IN_MASK, i, block, thread);
                    if (together(block, thread) && !warp_operation(block, thread, i)) return false;
                    if (thread.state != READY) return true;
                    continue;
                case WHERE_SHARED:
                case WHERE_GLOBAL:
                    r[i.d[0]] = (r[i.s[0]] - SHARED_WINDOW < SHARED_WINDOW) == (i.kind == WHERE_SHARED);
                    break;
            }
            ++thread.pc;
        }
        return true;
    }

    // ---- orders

    std::vector<std::pair<Block*, Thread*>> ready[2];  // and those that starve
    std::vector<uint32_t> places;                      // of every thread there
    std::vector<uint8_t> starves;
    bool keeps_lists = false;
    Block* released = nullptr;                         // which has passed a barrier just now

    uint32_t number_of(const Block& block, const Thread& thread) const {
        return block.index * launch.block_size + thread.number;
    }

    void make_ready(Block& block, Thread& thread) {
        thread.state = READY;
        if (!keeps_lists) return;
        auto& list = ready[starves[number_of(block, thread)]];
        places[number_of(block, thread)] = (uint32_t)list.size();
        list.push_back({&block, &thread});
    }

    void unmake_ready(Block& block, Thread& thread) {
        if (!keeps_lists) return;
        auto& list = ready[starves[number_of(block, thread)]];
        const uint32_t place = places[number_of(block, thread)];
        list[place] = list.back();
        places[number_of(*list[place].first, *list[place].second)] = place;
        list.pop_back();
    }

    // Blocks one after another; of a block the first warp, or the last, goes as far as it can, then the next.
    bool in_turn(bool backwards) {
        Block block;
        for (int b = 0; b < launch.blocks; ++b) {
            start(block, backwards ? launch.blocks - 1 - b : b);
            const int size = launch.block_size, warps = (size + 31) / 32;
            bool back = backwards;
            for (bool ran = true; ran; back = !back) {
                ran = false;
                for (int w = 0; w < warps; ++w) {
                    const int warp = back ? warps - 1 - w : w;
                    for (bool again = true; again;) {
                        again = false;
                        for (int l = 0; l < 32; ++l) {
                            const int t = 32 * warp + (back ? 31 - l : l);
                            if (t >= size || block.threads[t].state != READY) continue;
                            if (!run(block, block.threads[t], (Word)launch.most_steps)) return false;
                            if (block.threads[t].state == READY)
                                if ((Word)launch.most_steps <= fault.steps)
                                    return fail(ENDLESS, launch.code[block.threads[t].pc], block, block.threads[t]);
                            again = ran = true;
                        }
                    }
                }
            }
            if (block.ended < (uint32_t)size) return stuck(block);
        }
        return true;
    }

    void set_starving(Block& block, uint32_t first, uint32_t count, bool starving) {
        for (uint32_t t = first; t < std::min(first + count, (uint32_t)launch.block_size); ++t) {
            Thread& thread = block.threads[t];
            if (thread.state == READY) unmake_ready(block, thread);
            starves[number_of(block, thread)] = starving;
            if (thread.state == READY) make_ready(block, thread);
        }
    }

    // All blocks at once, any thread next for any number of steps. Of four seeds one lets some threads of some blocks
    // starve, others from each barrier on; one a block; one lets every thread go as far as it can. Who starves goes on only
    // where no other can, or once in a long while, in case another spins for it.
    bool at_random() {
        Random random = {(Word)launch.seed};
        std::vector<Block> blocks(launch.blocks);
        const uint32_t all = launch.blocks * launch.block_size, way = (uint32_t)launch.seed % 4;
        places.resize(all), starves.resize(all), keeps_lists = true;
        for (Block& block : blocks) {
            start(block, (uint32_t)(&block - blocks.data()));
            for (Thread& thread : block.threads) make_ready(block, thread);
        }
        if (way == 2) set_starving(blocks[random.below(launch.blocks)], 0, launch.block_size, true);
        while (ready[0].size() + ready[1].size()) {
            if (way == 1 && released) {
                set_starving(*released, 0, launch.block_size, false);
                if (random.below(2)) {
                    const uint32_t first = random.below(launch.block_size);
                    set_starving(*released, first, 1 + random.below(launch.block_size - first), true);
                }
            }
            released = nullptr;
            const bool starving = ready[0].empty() || (!ready[1].empty() && random.below(4096) == 0);
            auto& list = ready[starving];
            const auto [block, thread] = list[random.below((uint32_t)list.size())];
            const Word steps = way == 3 ? 1 << 20 : 1 + (random.next() >> 32) % (1u << random.below(8));
            if (!run(*block, *thread, steps)) return false;
            if (fault.steps > (Word)launch.most_steps) return fail(ENDLESS, code[thread->pc].i, *block, *thread);
        }
        for (Block& block : blocks)
            if (block.ended < (uint32_t)launch.block_size) return stuck(block);
        return true;
    }

    void run_all() {
        if (launch.seed < 0)
            in_turn(launch.seed == -2);
        else
            at_random();
    }
};

extern "C" {

int operation(const char* name) { return place_of(OPERATIONS, name); }

int atomic(const char* name) { return place_of(ATOMICS, name); }

int special_register(const char* name) {
    int place = 0;
    for (const char* one : SPECIALS) {
        if (!std::strcmp(one, name)) return place;
        ++place;
    }
    return -1;
}

const char* operation_name(int place) {
    return place < (int)(sizeof OPERATIONS / sizeof *OPERATIONS) ? OPERATIONS[place].name : nullptr;
}

void run(const Launch* launch, Fault* fault) {
    if (launch->checked)
        Machine<true>(*launch, *fault).run_all();
    else
        Machine<false>(*launch, *fault).run_all();
}
}
