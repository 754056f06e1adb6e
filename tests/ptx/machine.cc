// Runs PTX kernels: one state machine per thread, all threads of all blocks of all ranks, in an order that a seed gives.
//
// A checked launch knows the arrays, each at an address of its own with a gap before the next, and stops at the first
// access outside of them, unaligned, of memory that nobody has written, or that races with another (races.h), and where
// threads wait for what never comes. An unchecked one takes addresses as they are, blocks one after another.
// Of one launch alone, loads see the last store that was run: what a weaker order could show is left to races.h. Where
// ranks run queues of launches at the same time, stores come late (memory.h).

#include <chrono>
#include <cstddef>
#include <queue>
#include <thread>

#include "operations.h"
#include "atomics.h"
#include "races.h"
#include "memory.h"
#include "launch.h"

static constexpr Word SHARED_WINDOW = 1ull << 56;  // where generic addresses of shared memory begin
static constexpr uint32_t LOOKS = 4;  // strong loads after which a thread lets others run
static constexpr Word POISON = 0xa5a5a5a5a5a5a5a5ull;

// ---- names of what a program may use

static const char* const SPECIALS[] = {
    "%tid.x", "%tid.y", "%tid.z", "%ntid.x", "%ntid.y", "%ntid.z", "%ctaid.x", "%ctaid.y", "%ctaid.z",
    "%nctaid.x", "%nctaid.y", "%nctaid.z", "%laneid", "%lanemask_eq", "%lanemask_lt", "%lanemask_le",
    "%lanemask_gt", "%lanemask_ge", "%smid", "%nsmid",
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
        case 18: return block;
        case 19: return launch.blocks;
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

enum State { READY, AT_WARP, AT_BARRIER, ENDED, ASLEEP, STOPPED };

struct Thread {
    Word* registers;
    uint32_t pc, number, mask, barrier;
    State state;
};

struct Decoded;

// A launch that runs: its code, and which array each instruction touched last.
struct Running {
    const Launch* launch = nullptr;
    const Decoded* code = nullptr;
    std::vector<int> recent;
};

struct Block {
    Running* running = nullptr;
    uint32_t index, ended = 0;
    uint32_t rank = 0, number = 0, first = 0;  // among the blocks and threads of all ranks
    std::vector<Word> registers;
    Word* free;                // registers that no thread has had
    std::vector<Word*> left;   // those of threads that have ended
    std::vector<uint8_t> shared, written;
    std::vector<Thread> threads;
    Cells cells;
    std::unordered_map<Word, Publication> locations;

    const Launch& launch() const { return *running->launch; }
};

struct Rank {
    const Launch* queue = nullptr;
    int32_t launches = 0, launch = 0;            // how many, and which runs
    uint32_t first_block = 0, first_thread = 0;  // among those of all ranks
    uint32_t most_blocks = 0, most_threads = 0;
    Running running;
    std::vector<Block> blocks;
    Word steps = 0;
    bool over = false;                           // has ended, or was stopped
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
    const Run& all;
    Fault& fault;
    std::vector<Rank> ranks;
    uint32_t block_count = 0, thread_count = 0;
    std::unordered_map<const Instruction*, std::vector<Decoded>> decoded;
    std::unique_ptr<Causality> causality;
    std::unique_ptr<WeakMemory> weak;
    std::vector<Cells> cells;  // of the areas that arrays lie in
    std::unordered_map<Word, Publication> locations;
    Access access;             // the last one that was allowed

    Machine(const Run& all, Fault& fault) : all(all), fault(fault), ranks(all.ranks) {
        const Launch* next = all.launches;
        for (Rank& rank : ranks) {
            rank.queue = next, rank.launches = all.queues[&rank - ranks.data()], next += rank.launches;
            rank.first_block = block_count, rank.first_thread = thread_count;
            for (int k = 0; k < rank.launches; ++k) {
                const Launch& launch = rank.queue[k];
                rank.most_blocks = std::max(rank.most_blocks, (uint32_t)launch.blocks);
                rank.most_threads = std::max(rank.most_threads, (uint32_t)(launch.blocks * launch.block_size));
                auto& code = decoded[launch.code];
                if (!code.empty()) continue;
                for (int c = 0; c < launch.instructions; ++c) {
                    const Instruction& i = launch.code[c];
                    code.push_back({i.kind == COMPUTE ? OPERATIONS[i.operation].compute : nullptr, i});
                }
            }
            block_count += rank.most_blocks, thread_count += rank.most_threads;
        }
        if (CHECKED) {
            causality = std::make_unique<Causality>(thread_count, all.ranks > 1, all.proxies);
            cells.resize(all.areas);
        }
        if (CHECKED && all.weak) weak = std::make_unique<WeakMemory>(*causality, ranks.size(), ~(Word)all.seed);
    }

    bool fail(int problem, const Instruction& i, const Block& block, const Thread& thread, Word address = 0,
              int bytes = 0) {
        fault.problem = problem, fault.place = i.place;
        fault.block = block.index, fault.thread = thread.number;
        fault.launch = (int)(&block.launch() - all.launches);
        fault.address = address, fault.bytes = bytes, fault.writes = i.writes;
        return false;
    }

    // Names the other party of a conflict.
    void blame(const Epoch& other) {
        const Rank& rank = ranks[causality->threads[other.thread].rank];
        const Launch* launch = rank.queue;
        for (int k = 0; k < rank.launches; ++k)
            if (rank.queue[k].first_place <= (int)other.place) launch = &rank.queue[k];
        fault.other_launch = (int)(launch - all.launches);
        fault.other_block = (other.thread - rank.first_thread) / launch->block_size;
        fault.other_thread = (other.thread - rank.first_thread) % launch->block_size;
        fault.other_place = other.place - launch->first_place;
    }

    // Begin the next launch of a rank.
    void begin(Rank& rank) {
        rank.running.launch = &rank.queue[rank.launch];
        const Launch& launch = *rank.running.launch;
        rank.running.code = decoded[launch.code].data();
        rank.running.recent.assign(launch.instructions, 0);
    }

    void start(Block& block, Rank& rank, uint32_t index) {
        block.running = &rank.running;
        const Launch& launch = block.launch();
        const size_t size = launch.block_size;
        block.index = index, block.ended = 0, block.rank = (uint32_t)(&rank - ranks.data());
        block.number = rank.first_block + index, block.first = rank.first_thread + index * launch.block_size;
        block.left.clear();
        block.registers.resize(size * launch.registers);
        block.threads.resize(size);
        block.shared.assign(launch.shared_bytes, (uint8_t)POISON);
        if (CHECKED) {
            block.written.assign(launch.shared_bytes, 0);
            block.cells.pages.clear();
            block.locations.clear();
            for (uint32_t t = 0; t < size; ++t) {
                causality->threads[block.first + t].block = block.number;
                causality->threads[block.first + t].rank = block.rank;
            }
        }
        for (uint32_t t = 0; t < size; ++t) block.threads[t] = {nullptr, 0, t, 0, 0, READY};
        block.free = block.registers.data();
    }

    // A thread's registers are those of one that has ended, if there is one: then they are in the cache.
    void give_registers(Block& block, Thread& thread) {
        const Launch& launch = block.launch();
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

    // Where some bytes are on the host, and in which array; null after a fault.
    uint8_t* reach(Block& block, Thread& thread, const Instruction& i, Word address, bool by_element, Range*& range) {
        const Word bytes = (Word)i.size * i.count;
        bool shared = i.space == SHARED;
        range = nullptr;
        if (i.space == GENERIC && address - SHARED_WINDOW < SHARED_WINDOW) shared = true, address -= SHARED_WINDOW;
        if (!CHECKED) return shared ? block.shared.data() + address : (uint8_t*)address;
        if (address % bytes) return fail(UNALIGNED, i, block, thread, address, bytes), nullptr;
        const Launch& launch = block.launch();
        Range* const ranges = shared ? launch.variables : launch.arrays;
        const int count = shared ? launch.variable_count : launch.array_count;
        int& found = block.running->recent[thread.pc];
        if (found >= count || address - ranges[found].base >= ranges[found].size) {
            const Range* const next = std::upper_bound(
                ranges, ranges + count, address, [](Word one, const Range& other) { return one < other.base; });
            found = std::max(0, (int)(next - ranges) - 1);  // the one that begins last before it
        }
        const bool inside = found < count && address - ranges[found].base < ranges[found].size;
        fault.array = shared ? (inside ? -2 - found : -1) : found < count && ranges[found].base <= address ? found : -1;
        if (!inside || address - ranges[found].base + bytes > ranges[found].size)
            return fail(OUTSIDE, i, block, thread, address, bytes), nullptr;
        range = &ranges[found];
        if (i.reads) range->bytes_read += bytes;
        if (i.writes) range->bytes_stored += bytes;
        const Word place = address - range->base;
        const bool multi = i.kind >= MULTI_LOAD;
        if (multi != (range->replicas != nullptr))
            return fail(multi ? NOT_MULTICAST : NOT_MULTIMEM, i, block, thread, address, bytes), nullptr;
        if (multi) {
            for (int k = 0; k < range->replica_count; ++k)
                if (!allowed(block, thread, i, range->replicas[k], false, address, place, by_element)) return nullptr;
            return range->host + place;
        }
        if (!allowed(block, thread, i, *range, shared, address, place, by_element)) return nullptr;
        return shared ? block.shared.data() + address : range->host + place;
    }

    // Whether an access within an array keeps the rules.
    bool allowed(Block& block, Thread& thread, const Instruction& i, const Range& range, bool shared, Word address,
                 Word place, bool by_element) {
        const Word bytes = (Word)i.size * i.count;
        if (i.writes && !range.writable) return fail(READ_ONLY, i, block, thread, address, bytes);
        uint8_t* written = shared ? &block.written[address] : range.written ? range.written + place : nullptr;
        if (written) {
            if (i.reads)
                for (Word b = 0; b < bytes; ++b)
                    if (!written[b]) return fail(UNWRITTEN, i, block, thread, address + b, bytes);
            if (i.writes) std::memset(written, 1, bytes);
        }
        const Launch& launch = block.launch();
        Cells& own = shared ? block.cells : cells[range.cells];
        const Word first = shared ? address : range.place + place;
        const bool synchronizes = i.strength > STRONG || (i.reads && i.writes);
        access = {block.first + thread.number, block.number, block.rank, (uint32_t)(launch.first_place + i.place),
                  shared ? block.first : 0, shared ? (uint32_t)launch.block_size : thread_count,
                  i.reads != 0, i.writes != 0, i.strength, i.scope,
                  synchronizes || shared ? ANY : i.proxy == FIRST_ADDRESS ? (int)range.proxy : i.proxy};
        if (!range.followed) return true;
        const uint32_t whole = by_element ? i.size : bytes;
        for (Word b = 0; b < bytes;) {
            Cells::Page& page = own.page(first + b, whole);
            for (Word end = std::min(bytes, b + Cells::PAGE - (first + b) % Cells::PAGE); b < end; b += page.bytes) {
                Cell& cell = page.cells[(first + b) % Cells::PAGE / page.bytes];
                const Conflict found = causality->touch(cell, access, (uint32_t)(b % whole) << 5 | whole);
                if (!found.other.clock) continue;
                blame(found.other);
                return fail(found.proxy ? PROXIES : RACE, i, block, thread, address + b, bytes);
            }
        }
        if (weak && !shared) return true;  // which observes what it loads and stores by itself
        for (Word b = 0; b < bytes; b += whole)
            causality->observe(access, shared ? block.locations : locations,
                               shared ? address + b : (Word)(range.host + place + b));
        return true;
    }

    // Loads, stores and atomics of the memory that ranks share; false after a fault.
    bool across_ranks(Block& block, Thread& thread, const Instruction& i, Word address) {
        Word* const r = thread.registers;
        Range* range;
        uint8_t* const host = reach(block, thread, i, address, i.kind != ATOMIC, range);
        if (!host) return false;
        const Word place = address - range->base;
        // the elements of a vector in any order
        const int turn = i.count > 1 ? (int)weak->random.below(i.count) : 0;
        for (int n = 0; n < i.count; ++n) {
            const int k = n ^ turn;
            if (n && i.strength != WEAK) weak->drift();
            uint8_t* const at = host + k * i.size;
            switch (i.kind) {
                case LOAD: r[i.d[k]] = extended(weak->load(access, at, i.size), i); break;
                case STORE: weak->store(access, at, cut(r[i.s[k]], i.size), i.size); break;
                case ATOMIC:
                    r[i.d[0]] = extended(weak->change(access, at, i.size, [&](Word before) {
                        return ATOMICS[i.operation].combine(extended(before, i), r[i.s[1]], r[i.s[2]]);
                    }), i);
                    break;
                default: everywhere(i, r, k, *range, place + k * i.size);
            }
        }
        return true;
    }

    // An element of a multimem instruction, on all ranks in any order.
    void everywhere(const Instruction& i, Word* r, int k, const Range& range, Word place) {
        std::vector<uint8_t*> replicas;
        for (int c = 0; c < range.replica_count; ++c) replicas.push_back(range.replicas[c].host + place);
        for (size_t c = replicas.size(); c > 1; --c)
            std::swap(replicas[c - 1], replicas[weak->random.below((uint32_t)c)]);
        std::vector<Word> values;
        for (uint8_t* const at : replicas) {
            if (i.kind == MULTI_LOAD) {
                values.push_back(weak->load(access, at, i.size));
                continue;
            }
            const Word value = cut(r[i.s[k]], i.size);
            if (i.kind == MULTI_STORE)
                weak->store(access, at, value, i.size);
            else
                weak->change(access, at, i.size, [&](Word before) {
                    const Word both[] = {before, value};
                    return REDUCTIONS[i.operation].fold(both, 2);
                });
        }
        if (i.kind == MULTI_LOAD)
            r[i.d[k]] = extended(REDUCTIONS[i.operation].fold(values.data(), values.size()), i);
    }

    // Whether an access goes to memory that ranks share.
    bool shares(const Instruction& i, Word address) const {
        return CHECKED && weak && i.space != SHARED && !(i.space == GENERIC && address - SHARED_WINDOW < SHARED_WINDOW);
    }

    static Word extended(Word value, const Instruction& i) {
        if (i.extends && i.size < 8) {
            const int rest = 64 - 8 * i.size;
            value = (Word)((int64_t)(value << rest) >> rest);
        }
        return value;
    }

    static Word loaded(const uint8_t* from, const Instruction& i) {
        Word value = 0;
        std::memcpy(&value, from, i.size);
        return extended(value, i);
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

    void met(const std::vector<uint32_t>& members) {
        causality->meet(members);
        if (weak) weak->met(members);
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
            members.push_back(block.first + first + lane);
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
        if (CHECKED && i.kind == WARP_BARRIER) met(members);
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
            members.push_back(block.first + own.number);
            if (k && i.extends && own.number / 32 == here[k - 1]->number / 32 && own.pc != here[k - 1]->pc) {
                fault.other_block = block.index, fault.other_thread = here[k - 1]->number;
                fault.other_place = (int)here[k - 1]->pc;
                fault.other_launch = (int)(&block.launch() - all.launches);
                return fail(DIVERGED, block.launch().code[own.pc], block, own);
            }
        }
        if (CHECKED) met(members);
        released = &block;
        for (Thread* own : here) {
            ++own->pc;
            make_ready(block, *own);
        }
        return true;
    }

    // Threads that wait while none can go on: for whom?
    bool stuck(Block& block) {
        const Launch& launch = block.launch();
        fault.other_launch = (int)(&launch - all.launches);
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
        const Launch& launch = block.launch();
        const Decoded* const code = block.running->code;
        const Counted counted = {fault.steps, steps, steps};
        uint32_t looks = 0;
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
                    const Word address = r[i.s[0]] + i.offset;
                    if (shares(i, address)) {
                        if (!across_ranks(block, thread, i, address)) return false;
                        if (i.strength == WEAK || ++looks < LOOKS) break;
                        --steps, ++thread.pc;  // it may wait for others, who should come to run
                        return true;
                    }
                    Range* range;
                    const uint8_t* from = reach(block, thread, i, address, true, range);
                    if (CHECKED && !from) return false;
                    for (int k = 0; k < i.count; ++k) r[i.d[k]] = loaded(from + k * i.size, i);
                    break;
                }
                case STORE: {
                    const Word address = r[i.d[0]] + i.offset;
                    if (shares(i, address)) {
                        if (!across_ranks(block, thread, i, address)) return false;
                        break;
                    }
                    Range* range;
                    uint8_t* to = reach(block, thread, i, address, true, range);
                    if (CHECKED && !to) return false;
                    for (int k = 0; k < i.count; ++k) std::memcpy(to + k * i.size, r + i.s[k], i.size);
                    break;
                }
                case ATOMIC: {
                    const Word address = r[i.s[0]] + i.offset;
                    if (shares(i, address)) {
                        if (!across_ranks(block, thread, i, address)) return false;
                        break;
                    }
                    Range* range;
                    uint8_t* at = reach(block, thread, i, address, false, range);
                    if (CHECKED && !at) return false;
                    const Word before = loaded(at, i);
                    const Word after = ATOMICS[i.operation].combine(before, r[i.s[1]], r[i.s[2]]);
                    std::memcpy(at, &after, i.size);
                    r[i.d[0]] = before;
                    break;
                }
                case FENCE:
                    if (CHECKED) causality->fence(block.first + thread.number, i.scope);
                    if (CHECKED && weak) weak->fence(block.first + thread.number, i.scope);
                    break;
                case PROXY_FENCE:
                    if (CHECKED) causality->fence_proxies(block.first + thread.number);
                    break;
                case MULTI_LOAD:
                case MULTI_STORE:
                case MULTI_ATOMIC: {
                    const Word address = r[i.kind == MULTI_LOAD ? i.s[0] : i.d[0]] + i.offset;
                    if (!CHECKED || !weak) return fail(NOT_MULTICAST, i, block, thread, address, i.size * i.count);
                    if (!across_ranks(block, thread, i, address)) return false;
                    break;
                }
                case CLOCK:
                    r[i.d[0]] = time(fault.steps + counted.before - steps);
                    if (CHECKED || !keeps_lists) break;
                    --steps, ++thread.pc;  // it has looked in vain for long: others should come to run
                    ++idle;
                    return true;
                case SLEEP:
                    --steps, ++thread.pc;
                    unmake_ready(block, thread);
                    sleep(block, thread, time(fault.steps + counted.before - steps) + (uint32_t)r[i.s[0]]);
                    return true;
                case TRAP:
                    return fail(TRAPPED, i, block, thread);
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

    uint32_t number_of(const Block& block, const Thread& thread) const { return block.first + thread.number; }

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

    struct Sleeper {
        Word until;
        Block* block;
        Thread* thread;
        bool operator<(const Sleeper& other) const { return until > other.until; }
    };
    std::priority_queue<Sleeper> sleepers;
    Word jumped = 0;  // nanoseconds in which all slept
    uint32_t idle = 0;  // threads, one after another, that have looked at the real clock and done nothing else

    // What %globaltimer shows after so many instructions of all threads.
    Word time(Word steps) const {
        if (!CHECKED) return std::chrono::steady_clock::now().time_since_epoch().count();
        return steps * (Word)all.nanoseconds + jumped;
    }

    void sleep(Block& block, Thread& thread, Word until) {
        if (!keeps_lists) {  // nobody else runs meanwhile
            jumped = std::max(jumped, until - fault.steps * (Word)all.nanoseconds);
            return;
        }
        thread.state = ASLEEP;
        sleepers.push({until, &block, &thread});
    }

    // Wake those whose time has come, and where none can run the next one; whether there is anyone to run.
    bool wake() {
        while (!sleepers.empty()) {
            const Sleeper next = sleepers.top();
            if (next.until > time(fault.steps)) {
                if (ready[0].size() + ready[1].size()) return true;
                if (next.thread->state == ASLEEP) jumped += next.until - time(fault.steps);
            }
            sleepers.pop();
            if (next.thread->state == ASLEEP) make_ready(*next.block, *next.thread);
        }
        return ready[0].size() + ready[1].size();
    }

    // Blocks one after another; of a block the first warp, or the last, goes as far as it can, then the next.
    bool in_turn(bool backwards) {
        Block block;
        begin(ranks[0]);
        const Launch& launch = *ranks[0].running.launch;
        for (int b = 0; b < launch.blocks; ++b) {
            start(block, ranks[0], backwards ? launch.blocks - 1 - b : b);
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
                            if (!run(block, block.threads[t], (Word)all.most_steps)) return false;
                            if (block.threads[t].state == READY)
                                if ((Word)all.most_steps <= fault.steps)
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
        for (uint32_t t = first; t < std::min(first + count, (uint32_t)block.threads.size()); ++t) {
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
        begin(ranks[0]);
        const Launch& launch = *ranks[0].running.launch;
        Random random = {(Word)all.seed};
        std::vector<Block> blocks(launch.blocks);
        const uint32_t way = (uint32_t)all.seed % 4;
        places.resize(thread_count), starves.resize(thread_count), keeps_lists = true;
        for (Block& block : blocks) {
            start(block, ranks[0], (uint32_t)(&block - blocks.data()));
            for (Thread& thread : block.threads) make_ready(block, thread);
        }
        if (way == 2) set_starving(blocks[random.below(launch.blocks)], 0, launch.block_size, true);
        while (wake()) {
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
            const uint32_t before = idle;
            if (!run(*block, *thread, steps)) return false;
            if (fault.steps > (Word)all.most_steps) return fail(ENDLESS, launch.code[thread->pc], *block, *thread);
            if (idle == before) idle = 0;
            if (idle > ready[0].size() + ready[1].size()) {  // all wait for other kernels or for the host
                std::this_thread::sleep_for(std::chrono::microseconds(200));
                idle = 0;
            }
        }
        for (Block& block : blocks)
            if (block.ended < (uint32_t)launch.block_size) return stuck(block);
        return true;
    }

    void run_all() {
        if (all.seed < 0)
            in_turn(all.seed == -2);
        else
            at_random();
    }
};

#include "ranks.h"

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

int reduction(const char* name) { return place_of(REDUCTIONS, name); }

void run(const Run* all, Fault* fault) {
    if (all->weak)
        Ranks(*all, *fault).run_all();
    else if (all->checked)
        Machine<true>(*all, *fault).run_all();
    else
        Machine<false>(*all, *fault).run_all();
}
}
