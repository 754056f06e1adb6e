// Operations of the switch between GPUs, from compute capability 9.0 on: a load from one offset of all arenas adds
// them, and a store to one offset is copied to all. forest.cu precedes.
//
// The order in which it adds is its own: sums of floating-point numbers have other last bits than the plan's.

// Multicast and arena addresses alias the same memory; only this fence orders accesses through one behind the other.
struct BothWays {
    static constexpr bool USED = true;
    __device__ static void both_ways() { asm volatile("fence.proxy.alias;" ::: "memory"); }

    // A chunk; slots hold whole vectors, with any contents in the last lanes.
    template <class Element, class Operation, class Last>
    __device__ static void run(const Chunk<Element, Operation, Last>& chunk, long long count, bool gathers, bool spreads,
                               bool whole);
};

// Stores sixteen bytes to one offset in all arenas.
__device__ inline void spread(void* all, uint4 raw) {
    asm volatile("multimem.st.relaxed.sys.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(all), "f"(__uint_as_float(raw.x)),
                 "f"(__uint_as_float(raw.y)), "f"(__uint_as_float(raw.z)), "f"(__uint_as_float(raw.w))
                 : "memory");
}

// Loads sixteen bytes as sums over one offset in all arenas; the switch lacks some operations.
template <class Element, class Operation>
struct Added {
    __device__ static uint4 from(const void*) { return uint4(); }
};

#define ADDED(ELEMENT, OPERATION)              \
    template <>                                \
    struct Added<ELEMENT, OPERATION> {         \
        __device__ static uint4 from(const void* all) {

#define ADDED_END \
        }         \
    };

#define ADDED_4(ELEMENT, OPERATION, TEXT, CONSTRAINT, REGISTER)                                \
    ADDED(ELEMENT, OPERATION)                                                                  \
    union {                                                                                    \
        uint4 raw;                                                                             \
        REGISTER part[4];                                                                      \
    } sum;                                                                                     \
    asm volatile("multimem.ld_reduce.relaxed.sys.global." TEXT " {%0, %1, %2, %3}, [%4];"      \
                 : "=" CONSTRAINT(sum.part[0]), "=" CONSTRAINT(sum.part[1]), "=" CONSTRAINT(sum.part[2]), \
                   "=" CONSTRAINT(sum.part[3])                                                 \
                 : "l"(all)                                                                    \
                 : "memory");                                                                  \
    return sum.raw;                                                                            \
    ADDED_END

#define ADDED_ONE_BY_ONE(ELEMENT, OPERATION, TEXT, CONSTRAINT, REGISTER)                          \
    ADDED(ELEMENT, OPERATION)                                                                     \
    constexpr int PARTS = sizeof(uint4) / sizeof(REGISTER);                                       \
    union {                                                                                       \
        uint4 raw;                                                                                \
        REGISTER part[PARTS];                                                                     \
    } sum;                                                                                        \
    _Pragma("unroll") for (int k = 0; k < PARTS; ++k)                                             \
        asm volatile("multimem.ld_reduce.relaxed.sys.global." TEXT " %0, [%1];"                   \
                     : "=" CONSTRAINT(sum.part[k])                                                \
                     : "l"((const REGISTER*)all + k)                                              \
                     : "memory");                                                                 \
    return sum.raw;                                                                               \
    ADDED_END

// Before CUDA 12.4 halves are accumulated in half precision.
#if __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1204
#define WIDE "add.acc::f32.v4."
#else
#define WIDE "add.v4."
#endif

ADDED_4(float, Sum, "add.v4.f32", "f", float)
ADDED_4(Complex<float>, Sum, "add.v4.f32", "f", float)
ADDED_4(Half, Sum, WIDE "f16x2", "r", unsigned)
ADDED_4(Bfloat16, Sum, WIDE "bf16x2", "r", unsigned)
ADDED_ONE_BY_ONE(double, Sum, "add.f64", "d", double)
ADDED_ONE_BY_ONE(Complex<double>, Sum, "add.f64", "d", double)
ADDED_ONE_BY_ONE(unsigned, Sum, "add.u32", "r", unsigned)
ADDED_ONE_BY_ONE(unsigned long long, Sum, "add.u64", "l", unsigned long long)
ADDED_ONE_BY_ONE(int, Min, "min.s32", "r", int)
ADDED_ONE_BY_ONE(int, Max, "max.s32", "r", int)
ADDED_ONE_BY_ONE(unsigned, Min, "min.u32", "r", unsigned)
ADDED_ONE_BY_ONE(unsigned, Max, "max.u32", "r", unsigned)
ADDED_ONE_BY_ONE(long long, Min, "min.s64", "l", long long)
ADDED_ONE_BY_ONE(long long, Max, "max.s64", "l", long long)
ADDED_ONE_BY_ONE(unsigned long long, Min, "min.u64", "l", unsigned long long)
ADDED_ONE_BY_ONE(unsigned long long, Max, "max.u64", "l", unsigned long long)

template <class Element, class Operation, class Last>
__device__ void BothWays::run(const Chunk<Element, Operation, Last>& chunk, long long count, bool gathers, bool spreads,
                              bool whole) {
    constexpr int LANES = Vector<Element>::LANES, BATCH = Vector<Element>::BATCH;
#pragma unroll 1
    for (long long begin = threadIdx.x; begin * LANES < count; begin += BATCH * blockDim.x) {
        Vector<Element> value[BATCH];
#pragma unroll
        for (int u = 0; u < BATCH; ++u) {
            const long long at = begin + u * blockDim.x;
            if (at * LANES >= count) continue;
            if (gathers)
                value[u].raw = Added<Element, Operation>::from((const uint4*)chunk.arriving[0] + at);
            else if (whole && (at + 1) * LANES <= count)
                value[u].raw = ((const uint4*)chunk.operand())[at];
            else
#pragma unroll
                for (int l = 0; l < LANES; ++l)
                    if (at * LANES + l < count) value[u].lane[l] = chunk.operand()[at * LANES + l];
        }
#pragma unroll 1
        for (int k = chunk.own ? 0 : 1; k < chunk.arrivals && !gathers; ++k) {
            const uint4* from = (const uint4*)in_global_memory(chunk.arriving[k]);
#pragma unroll
            for (int u = 0; u < BATCH; ++u) {
                Vector<Element> other;
                if ((begin + u * blockDim.x) * LANES < count) other.raw = from[begin + u * blockDim.x];
#pragma unroll
                for (int l = 0; l < LANES; ++l) value[u].lane[l] = Operation::join(value[u].lane[l], other.lane[l]);
            }
        }
        chunk.finish(value);
#pragma unroll
        for (int u = 0; u < BATCH; ++u) {
            const long long at = begin + u * blockDim.x;
            if (at * LANES >= count) continue;
            if (spreads) spread((uint4*)chunk.departing[0] + at, value[u].raw);
#pragma unroll 1
            for (int k = spreads ? chunk.departures : 0; k <= chunk.departures; ++k) {
                Element* const to = k < chunk.departures ? chunk.departing[k] : chunk.kept;
                if (!to) continue;
                if (whole && (at + 1) * LANES <= count)
                    ((uint4*)in_global_memory(to))[at] = value[u].raw;
                else
#pragma unroll
                    for (int l = 0; l < LANES; ++l)
                        if (at * LANES + l < count) in_global_memory(to)[at * LANES + l] = value[u].lane[l];
            }
        }
    }
}

#define SWITCH(NAME, ELEMENT, OPERATION, LAST) ALONG_TREES(NAME, ELEMENT, OPERATION, LAST, BothWays)
