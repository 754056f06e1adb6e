// One kernel that runs all of a rank's part in a collective, over memory that the ranks' GPUs write to each other.
// arithmetic.cu precedes, the lines of the kernels follow. See backends/nccl/kernel_program.py for the tables.
//
// A step joins the arrivals in slots of this rank's arena, in the plan's order, and forwards the sum: to slots of
// other ranks' arenas, and to this rank's own buffer. Slots of pulled edges lie in the arena of the source. A flag with
// the chunk's number follows behind a barrier of the block; a flag back says that a slot is free again. Flags only grow,
// and each has one writer.

constexpr int MOST_ENDS = 256;         // of a step
constexpr int TABLE_WORDS = 2048;      // of 8 bytes, for the tables of a block in shared memory
constexpr unsigned POLLS = 256;        // of a flag, before the clock is looked at

struct Step {
    long long level;                   // chunk c has its turn in round c + level
    long long start, stop, chunk;      // elements of the shard, and of a chunk
    long long part, parts, chunks;     // chunk c of the step's chunks is number part + parts * c of the shard
    long long own, own_first;          // buffer of the first operand, and the element that it begins with; -1: none
    long long kept, kept_first;        // buffer to write to; -1: none
    long long final;                   // the sum is complete
    long long first, arrivals, departures;  // its ends: arrivals in the order of joining, then departures
    long long direct;                  // some of them lead into results
    long long gathers, spreads;        // the switch adds arrivals; and copies departures
    long long switched;                // the switch does so here or at a peer
};

struct End {
    long long peer;
    long long home;                    // rank whose arena holds the data
    long long slots, count, stride;    // place in that arena, number, bytes from one to the next; see placed()
    long long data, credit;            // flags: in the arena of the receiver; in that of the sender
    long long sent;                    // index of this rank's counter of the chunks of earlier collectives
    long long row;                     // of the transfer table, for errors
};

struct Control {
    char* const* arenas;               // of all ranks, as this one sees them
    char* multicast;                   // multicast address of all arenas, for the switch; or null
    unsigned long long* dead;          // in GPU memory: not zero after any failure
    const unsigned long long* others;  // not zero after a failure of ranks that sent messages of this slice; or null
    unsigned long long* gave_up;       // what the messages behind this kernel tell of it; or null
    unsigned long long* status;        // in the host's memory, see below
    long long rank, ranks;
    long long timeout;                 // nanoseconds that this rank waits for a chunk
    long long calls;                   // offset in each arena of what the ranks tell of their calls
    long long divisor;                 // of averages: the number of ranks, without helpers
};

struct Job {
    Control control;
    const long long* blocks;           // the steps of each block: blocks[b] to blocks[b + 1]
    const Step* steps;
    const End* ends;                   // in the order of the steps
    unsigned long long* sent;
    unsigned long long phase;          // which kernel of the collective this is
};

// Words shared with the host: its stop flag; the failure; and two words of each block: its progress, phase << 32 |
// chunks, or COMPLETE after the last; and the chunk that it has waited for since: round << 40 | (peer + 1) << 24 | row,
// or 0.
//
// A block waits for a chunk of an earlier round, in this rank or in a block of a slower peer. So if every rank names
// the peer of its block that waits in the earliest round, the named peers lead to the rank at fault.
enum Status { STOP, FAILED, BLOCKS };
enum Failure { FINE, LATE, STOPPED, TOLD, DIFFERS };

constexpr unsigned long long COMPLETE = 0xffffffffull;

// ---- flags

__device__ inline unsigned long long acquired(const void* flag) {
    unsigned long long value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
    return value;
}

__device__ inline void release(void* flag, unsigned long long value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");
}

// Words that the host may read at any time: they order nothing.
__device__ inline void tell(void* word, unsigned long long value) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

__device__ inline long long now() {
    long long value;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(value)::"memory");
    return value;
}

// Publishes a block's progress; it waits for nothing.
__device__ inline void progress(const Control& control, unsigned long long done) {
    asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(control.status + BLOCKS + 2 * blockIdx.x),
                 "l"(done), "l"(0ull)
                 : "memory");
}

// Tells the ranks that get messages from this kernel that they have no data. Each slice has a word of its own, since
// the messages of one are read while kernels of others run.
__device__ inline void give_up(const Control& control, Failure what) {
    // once, since the other side of a message that was aborted may still read it
    if (control.gave_up && !acquired(control.gave_up)) tell(control.gave_up, (unsigned long long)what);
}

// Reports the first failure.
__device__ inline void fail(const Control& control, Failure what) {
    give_up(control, what);
    if (atomicCAS(control.dead, 0ull, (unsigned long long)what) == 0)
        tell(control.status + FAILED, (unsigned long long)what);
}

// Publishes the chunk that a block waits for.
__device__ inline void waits(const Control& control, long long round, long long peer, long long row) {
    tell(control.status + BLOCKS + 2 * blockIdx.x + 1, round << 40 | (peer + 1) << 24 | row);
}

// Whether this rank or one that sends it messages failed before this kernel, or the host has stopped it. The failure
// is recorded for the ranks that get messages from this one.
__device__ inline bool ended(const Control& control) {
    if (acquired(control.dead)) {
        give_up(control, STOPPED);
        return true;
    }
    if (acquired(control.status + STOP)) {
        fail(control, STOPPED);
        return true;
    }
    if (!control.others) return false;
    for (long long peer = 0; peer < control.ranks; ++peer)
        if (control.others[peer]) {
            waits(control, 0, peer, 0);
            fail(control, TOLD);
            return true;
        }
    return false;
}

// Waits for a condition; false if this collective has failed.
template <class Condition>
__device__ bool comes(const Control& control, long long round, long long peer, long long row,
                      const Condition& condition) {
    long long begun = 0;
    for (unsigned polls = 1; !condition(); ++polls) {
        if (polls % POLLS) continue;
        const long long time = now();
        if (!begun) begun = time;
        waits(control, round, peer, row);
        if (acquired(control.dead)) return false;
        const bool stopped = acquired(control.status + STOP) != 0;
        if (stopped || time - begun > control.timeout) {
            fail(control, stopped ? STOPPED : LATE);
            return false;
        }
    }
    return true;
}

// ---- a comparison of calls
//
// A rank stores a digest of its call in the arena of every rank, and releases the number of the call behind it. Calls
// with even and odd numbers have words of their own: a rank that stores a number has had the one before from all ranks,
// so nobody reads what it overwrites.

constexpr long long CALL_BYTES = 16;   // of a rank: the digest, the number

__device__ inline unsigned long long* told(const Control& control, long long owner, long long sender,
                                           unsigned long long number) {
    const long long place = (long long)(number % 2) * control.ranks + sender;
    return (unsigned long long*)(control.arenas[owner] + control.calls + place * CALL_BYTES);
}

__device__ inline void tell_all(const Control& control, unsigned long long number, unsigned long long digest) {
    for (long long peer = threadIdx.x; peer < control.ranks; peer += blockDim.x) {
        unsigned long long* const there = told(control, peer, control.rank, number);
        there[0] = digest;
        release(there + 1, number);
    }
}

// Whether this kernel may run, for all threads of a block alike: nothing has failed, and all ranks are about to do the
// same. Otherwise no later kernel runs. Calls without a number are not compared.
__device__ inline bool begins(const Control& control, unsigned long long number, unsigned long long digest) {
    __shared__ bool over;
    __shared__ int differs;
    if (threadIdx.x == 0) {
        over = ended(control);
        differs = 0;
    }
    __syncthreads();  // which publishes copied tables too
    if (over || !number) return !over;
    if (blockIdx.x == 0) tell_all(control, number, digest);
#pragma unroll 1
    for (long long peer = threadIdx.x; peer < control.ranks; peer += blockDim.x) {
        const unsigned long long* const here = told(control, control.rank, peer, number);
        const bool came = comes(control, 0, peer, 0, [&] { return acquired(here + 1) == number; });
        if (came && here[0] == digest) continue;
        if (came) fail(control, DIFFERS);
        atomicExch(&differs, 1);
    }
    __syncthreads();
    if (differs) return false;
    if (threadIdx.x == 0) waits(control, 0, -1, 0);  // for nobody
    return true;
}

// ---- a chunk

// NVRTC 12.9 does not compile in_global_memory on these.
__device__ inline Truth* in_global_memory(Truth* pointer) { return pointer; }
__device__ inline const Truth* in_global_memory(const Truth* pointer) { return pointer; }

struct AsItIs {
    template <class Element>
    __device__ static Element result(Element sum, long long) {
        return sum;
    }
};

struct Average {
    template <class Element>
    __device__ static Element result(Element sum, long long ranks) {
        return quotient(sum, ranks);
    }
};

template <class Element, class Operation, class Last>
struct Chunk {
    Element* const* arriving;
    Element* const* departing;
    int arrivals, departures;
    const Element* own;                // null: the first arrival
    Element* kept;                     // null: nowhere
    long long divisor;                 // 0: not complete yet

    __device__ const Element* operand() const { return in_global_memory(own ? own : arriving[0]); }

    // Elements one by one, from `from` on.
    __device__ void elements(long long from, long long count) const {
#pragma unroll 1
        for (long long i = from + threadIdx.x; i < count; i += blockDim.x) {
            Element value = operand()[i];
#pragma unroll 1
            for (int k = own ? 0 : 1; k < arrivals; ++k)
                value = Operation::join(value, in_global_memory(arriving[k])[i]);
            if (divisor) value = Last::result(value, divisor);
#pragma unroll 1
            for (int k = 0; k < departures; ++k) in_global_memory(departing[k])[i] = value;
            if (kept) in_global_memory(kept)[i] = value;
        }
    }

    __device__ void finish(Vector<Element>* value) const {
        if (!divisor) return;
#pragma unroll
        for (int u = 0; u < Vector<Element>::BATCH; ++u)
#pragma unroll
            for (int l = 0; l < Vector<Element>::LANES; ++l)
                value[u].lane[l] = Last::result(value[u].lane[l], divisor);
    }

    __device__ void vectors(long long count) const {
        constexpr int BATCH = Vector<Element>::BATCH;
#pragma unroll 1
        for (long long begin = threadIdx.x; begin < count; begin += BATCH * blockDim.x) {
            Vector<Element> value[BATCH];
#pragma unroll
            for (int u = 0; u < BATCH; ++u)
                if (begin + u * blockDim.x < count) value[u].raw = ((const uint4*)operand())[begin + u * blockDim.x];
#pragma unroll 1
            for (int k = own ? 0 : 1; k < arrivals; ++k) {
                const uint4* from = (const uint4*)in_global_memory(arriving[k]);
                Vector<Element> other[BATCH];
#pragma unroll
                for (int u = 0; u < BATCH; ++u)
                    if (begin + u * blockDim.x < count) other[u].raw = from[begin + u * blockDim.x];
#pragma unroll
                for (int u = 0; u < BATCH; ++u)
#pragma unroll
                    for (int l = 0; l < Vector<Element>::LANES; ++l)
                        value[u].lane[l] = Operation::join(value[u].lane[l], other[u].lane[l]);
            }
            finish(value);
#pragma unroll 1
            for (int k = 0; k < departures; ++k) {
                uint4* to = (uint4*)in_global_memory(departing[k]);
#pragma unroll
                for (int u = 0; u < BATCH; ++u)
                    if (begin + u * blockDim.x < count) to[begin + u * blockDim.x] = value[u].raw;
            }
            if (!kept) continue;
#pragma unroll
            for (int u = 0; u < BATCH; ++u)
                if (begin + u * blockDim.x < count)
                    ((uint4*)in_global_memory(kept))[begin + u * blockDim.x] = value[u].raw;
        }
    }
};

// Without a switch that adds or copies; with one see switch.cu.
struct NoSwitch {
    static constexpr bool USED = false;
    __device__ static void both_ways() {}
    template <class Element, class Operation, class Last>
    __device__ static void run(const Chunk<Element, Operation, Last>&, long long, bool, bool, bool) {}
};

// ---- the tables of a block

struct Tables {
    const Step* steps;
    const End* ends;                   // of these steps
    char* const* arenas;
    const unsigned long long* earlier; // chunks of each end in earlier collectives; null: in the counters
    int count;                         // steps
    long long first;                   // number of the first end
};

__device__ inline void copy_words(unsigned long long* to, const void* from, long long words) {
#pragma unroll 1
    for (long long i = threadIdx.x; i < words; i += blockDim.x) to[i] = ((const unsigned long long*)from)[i];
}

// Returns the tables in shared memory if they fit: an acquire empties the L1 cache, so every later load from global
// memory would wait for the L2 cache. For all threads of the block alike; their next barrier publishes the copies.
__device__ inline Tables tables_of(const Job& job, unsigned long long* words) {
    constexpr long long STEP_WORDS = sizeof(Step) / 8, END_WORDS = sizeof(End) / 8;
    const long long begin = job.blocks[blockIdx.x], count = job.blocks[blockIdx.x + 1] - begin;
    const Step* const steps = job.steps + begin;
    if (!count) return {steps, job.ends, job.control.arenas, nullptr, 0, 0};
    const Step& last = steps[count - 1];
    const long long first = steps[0].first, ends = last.first + last.arrivals + last.departures - first;
    const long long ranks = job.control.ranks;
    if (ranks + count * STEP_WORDS + ends * (END_WORDS + 1) > TABLE_WORDS)
        return {steps, job.ends + first, job.control.arenas, nullptr, (int)count, first};
    unsigned long long* const own_steps = words + ranks;
    unsigned long long* const own_ends = own_steps + count * STEP_WORDS;
    unsigned long long* const earlier = own_ends + ends * END_WORDS;
    copy_words(words, job.control.arenas, ranks);
    copy_words(own_steps, steps, count * STEP_WORDS);
    copy_words(own_ends, job.ends + first, ends * END_WORDS);
#pragma unroll 1
    for (long long e = threadIdx.x; e < ends; e += blockDim.x) earlier[e] = job.sent[job.ends[first + e].sent];
    return {(const Step*)own_steps, (const End*)own_ends, (char* const*)words, earlier, (int)count, first};
}

// ---- a block

template <class Element, class Operation, class Last, class Switch>
struct Block {
    const Job& job;
    const Tables& tables;
    char* given;
    char* result;
    char* room;                        // workspace for sums that are needed again
    Element** places;                  // in shared memory, of the ends of a step
    int* failed;

    __device__ Element* buffer(long long number) const {
        return (Element*)(number == 0 ? given : number == 1 ? result : room);
    }

    // Threads take the ends of a step in turns, always the same ones.
    template <class Act>
    __device__ void each_end(const Step& step, const Act& act) const {
#pragma unroll 1
        for (int e = threadIdx.x; e < step.arrivals + step.departures; e += blockDim.x)
            act(e, tables.ends[step.first - tables.first + e], e < step.arrivals);
    }

    // Chunks of an end in earlier collectives.
    __device__ unsigned long long earlier(const End& end) const {
        return tables.earlier ? tables.earlier[&end - tables.ends] : job.sent[end.sent];
    }

    // Address of the data of an end: in a slot, of all ranks at once if a switch adds or copies it; in the result, if
    // results have one offset in all arenas; or in the buffer of a message.
    __device__ char* placed(const Step& step, const End& end, unsigned long long number, long long first,
                            bool by_switch) const {
        char* const* const arenas = tables.arenas;
        if (end.count < 0) return room + (end.slots + first - step.start) * sizeof(Element);
        if (end.count == 0)
            return arenas[end.home] + (result - arenas[job.control.rank]) + first * sizeof(Element);
        char* const arena = by_switch ? job.control.multicast : arenas[end.home];
        return arena + end.slots + number % (unsigned long long)end.count * end.stride;
    }

    __device__ bool run(const Step& step, long long c) const {
        char* const* const arenas = tables.arenas;
        char* const arena = arenas[job.control.rank];
        const long long first = step.start + (step.part + step.parts * c) * step.chunk;
        each_end(step, [&](int e, const End& end, bool arrives) {
            const unsigned long long number = earlier(end) + c;
            const char* const flag = arena + (arrives ? end.data : end.credit);
            const unsigned long long wanted = number + 1 - (arrives ? 0 : end.count);
            const bool there = end.count < 0 ||
                               comes(job.control, c + step.level, end.peer, end.row,
                                     [&] { return (long long)(acquired(flag) - wanted) >= 0; });
            if (!there) atomicExch(failed, 1);
            places[e] = (Element*)placed(step, end, number, first, arrives ? step.gathers : step.spreads);
        });
        __syncthreads();
        if (*failed) return false;
        if (step.switched) Switch::both_ways();
        const long long left = step.stop - first, count = left < step.chunk ? left : step.chunk;
        const Element* const own =
            step.own < 0 ? nullptr : buffer(step.own) + (first - step.own_first);
        Element* const kept = step.kept < 0 ? nullptr : buffer(step.kept) + (first - step.kept_first);
        const Chunk<Element, Operation, Last> chunk = {
            places, places + step.arrivals, (int)step.arrivals, (int)step.departures, own, kept,
            step.final ? job.control.divisor : 0};
        const Element* const direct = step.direct ? (const Element*)result + first : nullptr;
        const bool whole =
            ((unsigned long long)own | (unsigned long long)kept | (unsigned long long)direct) % VECTOR == 0;
        if (Switch::USED && (step.gathers || step.spreads)) {
            Switch::run(chunk, count, step.gathers, step.spreads, whole);
        } else {
            const long long vectors = whole ? count / Vector<Element>::LANES : 0;
            chunk.vectors(vectors);
            chunk.elements(vectors * Vector<Element>::LANES, count);
        }
        if (step.switched) Switch::both_ways();
        __syncthreads();
        each_end(step, [&](int, const End& end, bool arrives) {
            // one credit opened the result to its writers
            if (end.count < 0 || (end.count == 0 && arrives)) return;
            release(arenas[end.peer] + (arrives ? end.credit : end.data), earlier(end) + c + 1);
        });
        return true;
    }

    // Gives peers the credit to write to this rank's result, which is used for nothing else until the collective ends.
    __device__ void let_in(const Step& step) const {
        if (!step.direct) return;
        each_end(step, [&](int, const End& end, bool arrives) {
            if (arrives && end.count == 0)
                release(tables.arenas[end.peer] + end.credit, earlier(end) + step.chunks);
        });
    }

    __device__ void run_all() const {
        const Step* const steps = tables.steps;
        const int count = tables.count;
        bool more = true;
        unsigned long long done = job.phase << 32;
#pragma unroll 1
        for (int s = 0; s < count; ++s) let_in(steps[s]);
#pragma unroll 1
        for (long long round = 0; more; ++round) {
            more = false;
#pragma unroll 1
            for (int s = 0; s < count; ++s) {
                const long long c = round - steps[s].level;
                if (c >= steps[s].chunks) continue;
                more = true;
                if (c < 0) continue;
                if (!run(steps[s], c)) return;
                if (threadIdx.x == 0) progress(job.control, ++done);
            }
        }
#pragma unroll 1
        for (int s = 0; s < count; ++s)
            each_end(steps[s], [&](int, const End& end, bool) { job.sent[end.sent] = earlier(end) + steps[s].chunks; });
        if (threadIdx.x == 0) progress(job.control, job.phase << 32 | COMPLETE);
    }
};

// ---- small collectives: every rank sends its input to all others, and each joins all inputs in the plan's order
//
// A packet is 4 bytes of data and the number of the collective in a word of 64 bits, so it needs no flag besides. The
// inbox has two halves by turns: a rank with all packets of the next collective knows that all others have read this
// one's.

constexpr int SMALL_THREADS = 256;
constexpr int DEPTH = 4;               // sums that wait for an operand
constexpr unsigned long long MOST_SEALS = 0xffffffffull;  // 0 is the initial value of an inbox

enum Action { TAKE, JOIN_ONE, JOIN_BOTH };

struct Small {
    Control control;
    long long count;                   // elements
    long long inbox, half;             // bytes: place in every arena; length of a half, of which each rank has a part
    const long long* bounds;           // the elements with which shards begin, and the end
    const long long* first;            // of each shard: begin of its order
    const long long* order;            // rank << 2 | action
    unsigned long long* number;        // of collectives before this one, for each block
};

struct Unit {                          // 16 bytes of data
    ulonglong2 packets[2];
};

__device__ inline void send(ulonglong2* to, unsigned long long first, unsigned long long second) {
    asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(first), "l"(second) : "memory");
}

__device__ inline ulonglong2 received(const ulonglong2* from) {
    ulonglong2 two;
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(two.x), "=l"(two.y) : "l"(from) : "memory");
    return two;
}

__device__ inline void send(Unit* to, uint4 data, unsigned long long number) {
    const unsigned long long seal = number << 32;
    send(to->packets, seal | data.x, seal | data.y);
    send(to->packets + 1, seal | data.z, seal | data.w);
}

__device__ inline bool received(const Unit* from, uint4& data, unsigned long long number) {
    const ulonglong2 one = received(from->packets), other = received(from->packets + 1);
    data = {(unsigned)one.x, (unsigned)one.y, (unsigned)other.x, (unsigned)other.y};
    return one.x >> 32 == number && one.y >> 32 == number && other.x >> 32 == number && other.y >> 32 == number;
}

template <class Element, class Operation, class Last>
struct Exchange {
    static constexpr int LANES = Vector<Element>::LANES;
    const Small& job;
    const Element* given;
    Element* result;
    uint4 (*waiting)[SMALL_THREADS];   // in shared memory
    unsigned long long turn, seal;     // the half of the inbox, and the number in its packets

    __device__ long long units() const { return (job.count + LANES - 1) / LANES; }

    __device__ Unit* packets(long long owner, long long sender, long long unit) const {
        const long long part = job.half / job.control.ranks;
        return (Unit*)(job.control.arenas[owner] + job.inbox + turn * job.half + sender * part) + unit;
    }

    __device__ uint4 own(long long unit) const {
        Vector<Element> value;
#pragma unroll
        for (int l = 0; l < LANES; ++l)
            if (unit * LANES + l < job.count) value.lane[l] = in_global_memory(given)[unit * LANES + l];
        return value.raw;
    }

    __device__ bool take(long long sender, long long unit, Vector<Element>& value) const {
        if (sender == job.control.rank) {
            value.raw = own(unit);
            return true;
        }
        const Unit* const from = packets(job.control.rank, sender, unit);
        return comes(job.control, 0, sender, 0, [&] { return received(from, value.raw, seal); });
    }

    __device__ static void join(Vector<Element>& into, const Vector<Element>& first, const Vector<Element>& second) {
#pragma unroll
        for (int l = 0; l < LANES; ++l) into.lane[l] = Operation::join(first.lane[l], second.lane[l]);
    }

    // False if this collective has failed.
    __device__ bool join_all(long long unit) const {
        int shard = 0, depth = 0;
        while (unit * LANES >= job.bounds[shard + 1]) ++shard;
        Vector<Element> sum, other;
#pragma unroll 1
        for (long long k = job.first[shard]; k < job.first[shard + 1]; ++k) {
            const long long action = job.order[k] & 3;
            if (action == JOIN_BOTH) {
                other.raw = waiting[--depth][threadIdx.x];
                join(sum, other, sum);
            } else {
                if (!take(job.order[k] >> 2, unit, other)) return false;
                if (action == JOIN_ONE) {
                    join(sum, sum, other);
                } else {
                    if (k > job.first[shard]) waiting[depth++][threadIdx.x] = sum.raw;
                    sum = other;
                }
            }
        }
#pragma unroll
        for (int l = 0; l < LANES; ++l)
            if (unit * LANES + l < job.count)
                in_global_memory(result)[unit * LANES + l] = Last::result(sum.lane[l], job.control.divisor);
        return true;
    }

    __device__ void run_all() const {
        const long long first = (long long)blockIdx.x * blockDim.x + threadIdx.x, stride = gridDim.x * blockDim.x;
        // ranks begin with different peers
#pragma unroll 1
        for (long long unit = first; unit < units(); unit += stride)
#pragma unroll 1
            for (long long k = 1; k < job.control.ranks; ++k) {
                const long long peer = (job.control.rank + k) % job.control.ranks;
                send(packets(peer, job.control.rank, unit), own(unit), seal);
            }
#pragma unroll 1
        for (long long unit = first; unit < units(); unit += stride)
            if (!join_all(unit)) return;
    }
};

#define ALONG_TREES(NAME, ELEMENT, OPERATION, LAST, SWITCH)                                        \
    extern "C" __global__ void __launch_bounds__(512, 1)                                           \
        NAME(const Job* wanted, char* given, char* result, char* room, unsigned long long number,  \
             unsigned long long digest) {                                                          \
        __shared__ ELEMENT* places[MOST_ENDS];                                                     \
        __shared__ unsigned long long words[TABLE_WORDS];                                          \
        __shared__ Tables tables;                                                                  \
        __shared__ int failed;                                                                     \
        const Job job = *wanted;                                                                   \
        const Tables found = tables_of(job, words);                                                \
        const Block<ELEMENT, OPERATION, LAST, SWITCH> block = {job,  tables, given,  result,       \
                                                               room, places, &failed};             \
        if (threadIdx.x == 0) tables = found, failed = 0;                                          \
        if (begins(job.control, number, digest)) block.run_all();                                  \
    }

#define FOREST(NAME, ELEMENT, OPERATION, LAST) ALONG_TREES(NAME, ELEMENT, OPERATION, LAST, NoSwitch)

// Every block counts the collectives that begin, whether it has a unit of them or not.
#define SMALL(NAME, ELEMENT, OPERATION, LAST)                                                           \
    extern "C" __global__ void __launch_bounds__(SMALL_THREADS, 1)                                      \
        NAME(const Small* wanted, const ELEMENT* given, ELEMENT* result, unsigned long long call,       \
             unsigned long long digest) {                                                               \
        __shared__ uint4 waiting[DEPTH][SMALL_THREADS];                                                 \
        const Small job = *wanted;                                                                      \
        const unsigned long long number = job.number[blockIdx.x];                                       \
        if (!begins(job.control, call, digest)) return;                                                 \
        if (threadIdx.x == 0) job.number[blockIdx.x] = number + 1;                                      \
        const Exchange<ELEMENT, OPERATION, LAST> exchange = {job,     given,      result,               \
                                                             waiting, number % 2, number % MOST_SEALS + 1}; \
        exchange.run_all();                                                                             \
    }
