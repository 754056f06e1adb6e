// What the machine is given and what it tells, as in text.py, memory.py and machine.py.

enum Kind { COMPUTE, BRANCH, END, LOAD, STORE, ATOMIC, FENCE, BARRIER, WARP_BARRIER, SHUFFLE, VOTE, PARAMETER,
            WHERE_SHARED, WHERE_GLOBAL, NOTHING, PROXY_FENCE, CLOCK, SLEEP, TRAP, MULTI_LOAD, MULTI_STORE,
            MULTI_ATOMIC };
enum Space { GLOBAL, SHARED, GENERIC };
enum Problem { NONE, OUTSIDE, READ_ONLY, UNALIGNED, UNWRITTEN, RACE, DIVERGED, LANE_MISSING, NOT_IN_MASK,
               BARRIER_MISSING, ENDLESS, PROXIES, NOT_MULTIMEM, NOT_MULTICAST, TRAPPED };

struct Range {
    Word base, size;
    uint8_t* host;
    uint8_t* written;  // a byte for each, or null: all are
    int64_t writable, followed;  // here, by any rank
    Word cells, place;  // whose cells, and from which on: arrays that share bytes share these
    int64_t proxy;
    const Range* replicas;  // of a multicast address, on all ranks
    int64_t replica_count;
    Word bytes_read, bytes_stored;
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
    Range* arrays;
    Range* variables;  // of shared memory
    int32_t instructions, registers, constant_count, special_count, array_count, variable_count, shared_bytes;
    int32_t blocks, block_size, first_place;  // place: of its first instruction among those of all launches
};

struct Run {
    const Launch* launches;
    const int32_t* queues;          // how many launches each rank has
    Word *rank_steps, *rank_ended;  // what came of each: instructions, whether all its launches have ended
    int32_t ranks, areas, checked, weak, proxies, stopped;  // stopped: a rank, or -1
    int64_t seed, most_steps, stop_steps, nanoseconds;      // seed -1, -2: first or last thread and block first
};

struct Fault {
    int32_t problem, place, block, thread, writes, bytes, array, other_block, other_thread, other_place;
    int32_t launch, other_launch;
    Word address, steps;
};
