// Find the k largest magnitudes: keys, sums over a block, tiles, histograms. arithmetic.cu precedes, gather.cu,
// emit.cu, feedback.cu and entries.cu follow.
//
// A key is an element's bits without the sign, so magnitudes order as keys. Bits become known from the top, 11 at a
// time: every block counts its keys in shared memory, and the last block finds the bin of the k-th largest.
// Atomics only add or reserve space whose contents are sorted later: no result shows their order.

typedef unsigned long long Word;

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr int VECTORS = 4;   // of every thread in a tile
constexpr int BINS = 2048;
constexpr int COPIES = 2;    // of a block's bins: neighbours in a warp often meet in one
constexpr unsigned EVERY_LANE = 0xffffffffu;

struct State {       // zero before the first kernel
    Word ended;      // blocks of the running kernel
    Word key;        // of the k-th largest: the known bits, then zeros
    Word wanted;     // entries still to take among keys with these bits
    Word nan;        // whether x holds a NaN
    Word gathered;   // entries at or above the bound
};

// ---- keys

template <class Element>
struct Format;

template <>
struct Format<float> {
    typedef unsigned Key;
    static constexpr Key INFINITE = 0x7f800000u;
    __device__ static Key key(float value) { return __float_as_uint(value) & 0x7fffffffu; }
};

template <>
struct Format<double> {
    typedef Word Key;
    static constexpr Key INFINITE = 0x7ff0000000000000ull;
    __device__ static Key key(double value) { return (Word)__double_as_longlong(value) & 0x7fffffffffffffffull; }
};

template <>
struct Format<Half> {
    typedef unsigned Key;
    static constexpr Key INFINITE = 0x7c00u;
    __device__ static Key key(Half value) { return value.bits & 0x7fffu; }
};

template <>
struct Format<Bfloat16> {
    typedef unsigned Key;
    static constexpr Key INFINITE = 0x7f80u;
    __device__ static Key key(Bfloat16 value) { return value.bits & 0x7fffu; }
};

// ---- blocks

// Sum over the threads before this one, and over all.
__device__ inline Word sum_before(Word value, Word& total) {
    __shared__ Word of_warp[WARPS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    Word sum = value;
#pragma unroll
    for (int far = 1; far < 32; far *= 2) {
        const Word other = __shfl_up_sync(EVERY_LANE, sum, far);
        if (lane >= far) sum += other;
    }
    __syncthreads();  // an earlier call may still be read
    if (lane == 31) of_warp[warp] = sum;
    __syncthreads();
    Word before = 0;
    total = 0;
#pragma unroll
    for (int other = 0; other < WARPS; ++other) {
        if (other < warp) before += of_warp[other];
        total += of_warp[other];
    }
    return before + sum - value;
}

// Whether this is the last block to come here; then the other blocks' writes are visible.
__device__ inline bool ends_last(State* state) {
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {
        // by the counting thread: the fence publishes the block's writes before the barrier, not later ones
        __threadfence();
        last = atomicAdd(&state->ended, (Word)1) == (Word)gridDim.x - 1;
        __threadfence();
        if (last) state->ended = 0;
    }
    __syncthreads();
    return last;
}

// ---- tiles: THREADS x VECTORS vectors, which a block reads at a time

template <int BYTES>
struct Raw;
template <>
struct Raw<16> {
    typedef uint4 Type;
};
template <>
struct Raw<8> {
    typedef uint2 Type;
};
template <>
struct Raw<4> {
    typedef unsigned Type;
};

// A vector of elements: as many as 16 bytes hold of the wide type.
template <class Element, class Wide = Element>
union Pack {
    static constexpr int LANES = VECTOR / sizeof(Wide);
    static constexpr int TILE = THREADS * VECTORS * LANES;
    typename Raw<LANES * sizeof(Element)>::Type raw;
    Element lane[LANES];
    __device__ Pack() : raw() {}
};

// First element of a vector of this thread in its tile.
template <class Element>
__device__ inline int place_of(int vector) {
    return (vector * THREADS + (int)threadIdx.x) * Pack<Element>::LANES;
}

// Elements of a tile.
template <class Element>
__device__ inline int size_of(long long tile, long long count) {
    const long long rest = count - tile * Pack<Element>::TILE;
    return rest < Pack<Element>::TILE ? (int)rest : Pack<Element>::TILE;
}

// Vectors of a tile that begins at `from`, element by element if unaligned or incomplete.
template <class Element, class Wide, int COUNT>
__device__ inline void read(Pack<Element, Wide> (&pack)[COUNT], const Element* from, int first, int size) {
    typedef decltype(pack[0].raw) Vector;
    if (size == Pack<Wide>::TILE && (Word)from % sizeof(Vector) == 0) {
#pragma unroll
        for (int u = 0; u < COUNT; ++u) pack[u].raw = *(const Vector*)(from + place_of<Wide>(first + u));
        return;
    }
#pragma unroll
    for (int u = 0; u < COUNT; ++u)
#pragma unroll
        for (int l = 0; l < Pack<Wide>::LANES; ++l) {
            const int place = place_of<Wide>(first + u) + l;
            if (place < size) pack[u].lane[l] = from[place];
        }
}

template <class Element>
__device__ inline void store(Element* to, const Pack<Element>& pack, int place, int size) {
    if (size == Pack<Element>::TILE && (Word)to % VECTOR == 0) {
        *(uint4*)(to + place) = pack.raw;
        return;
    }
#pragma unroll
    for (int l = 0; l < Pack<Element>::LANES; ++l)
        if (place + l < size) to[place + l] = pack.lane[l];
}

// The summand of a tile when it is read: nothing.
template <class Element>
struct Nothing {
    __device__ Nothing in_global() const { return *this; }
    __device__ void add(Pack<Element> (&)[VECTORS], Element*, long long, int) const {}
};

// A tile of x, which begins at `first`, and its summand.
template <class Element, class Addend>
__device__ inline void read_tile(Pack<Element> (&pack)[VECTORS], Element* x, const Addend& addend, long long first,
                                 int size) {
    read(pack, x + first, 0, size);
    addend.add(pack, x, first, size);
}

// ---- histogram

// The bin that holds the wanted one, counted from the largest; the counts become zero again.
__device__ inline void find(Word* counts, Word known, int shift, Word wanted, State* state) {
    constexpr int EACH = BINS / THREADS;
    const int first = BINS - 1 - (int)threadIdx.x * EACH;
    Word found[EACH], sum = 0, total;
#pragma unroll
    for (int i = 0; i < EACH; ++i) sum += found[i] = atomicExch(counts + first - i, (Word)0);
    Word before = sum_before(sum, total);
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        if (before < wanted && wanted <= before + found[i]) {
            state->key = known | (Word)(first - i) << shift;
            state->wanted = wanted - before;
        }
        before += found[i];
    }
}

// Determines further bits of the k-th largest key; k is zero after the first pass. Counts the first elements of x:
// `length` if given, and at most `most`.
template <class Element, class Addend>
__device__ inline void histogram(Element* x, Addend addend, long long most, const Word* length, int shift, int bits,
                                 Word k, Word* counts, State* state) {
    typedef typename Format<Element>::Key Key;
    __shared__ unsigned bins[COPIES][BINS];
    for (int bin = threadIdx.x; bin < BINS; bin += THREADS)
        for (int copy = 0; copy < COPIES; ++copy) bins[copy][bin] = 0;
    __syncthreads();
    x = in_global_memory(x);
    addend = addend.in_global();
    const long long count = length && (long long)*length < most ? (long long)*length : most;
    const Word known = k ? 0 : state->key;
    const Word wanted = k ? k : state->wanted;
    const Key high = (Key)(known >> (shift + bits));
    const Key mask = ((Key)1 << bits) - 1;
    unsigned* own = bins[threadIdx.x % COPIES];
    unsigned last = 0, run = 0;  // equal ones in a row are added at once: zeros are often many
    Key greatest = 0;
    for (long long tile = blockIdx.x; tile * Pack<Element>::TILE < count; tile += gridDim.x) {
        const long long first = tile * Pack<Element>::TILE;
        const int size = size_of<Element>(tile, count);
        Pack<Element> pack[VECTORS];
        read_tile(pack, x, addend, first, size);
#pragma unroll
        for (int v = 0; v < VECTORS; ++v)
#pragma unroll
            for (int l = 0; l < Pack<Element>::LANES; ++l) {
                if (place_of<Element>(v) + l >= size) continue;
                const Key key = Format<Element>::key(pack[v].lane[l]);
                greatest = key > greatest ? key : greatest;
                if (key >> (shift + bits) != high) continue;
                const unsigned bin = (unsigned)(key >> shift & mask);
                if (bin != last) {
                    if (run) atomicAdd(own + last, run);
                    last = bin;
                    run = 0;
                }
                ++run;
            }
    }
    if (run) atomicAdd(own + last, run);
    if (greatest > Format<Element>::INFINITE) atomicExch(&state->nan, (Word)1);
    __syncthreads();
    for (int bin = threadIdx.x; bin < BINS; bin += THREADS) {
        Word sum = 0;
        for (int copy = 0; copy < COPIES; ++copy) sum += bins[copy][bin];
        if (sum) atomicAdd(counts + bin, sum);
    }
    if (ends_last(state)) find(counts, known, shift, wanted, state);
}
