// The last part of a selection, once the k-th largest key is known: gather.cu precedes, feedback.cu follows.
//
// It walks through the tiles in index order, either through the runs of a list of candidates or through all elements.
// A block has neighbouring tiles, a warp one at a time. `measure` counts, `emit` writes: a place in the result depends
// on the counts before it alone. Both need the same grid.

// ---- tiles as runs of elements

template <class Element, bool LISTED>
struct Runs {
    Element* x;  // the list's values, or all elements
    const unsigned short* places;
    long long count;  // of all elements, listed or not
    const Word* starts;
    const unsigned* kept;

    __device__ long long tiles() const { return (count + Pack<Element>::TILE - 1) / Pack<Element>::TILE; }
    __device__ long long first(long long block) const {
        const long long each = (tiles() + gridDim.x - 1) / gridDim.x;
        return each * block < tiles() ? each * block : tiles();
    }
    __device__ long long start(long long tile) const {
        return LISTED ? (long long)starts[tile] : tile * Pack<Element>::TILE;
    }
    __device__ int length(long long tile) const {
        return LISTED ? (int)kept[tile] : size_of<Element>(tile, count);
    }
    __device__ long long index(long long tile, long long entry) const {
        return LISTED ? tile * Pack<Element>::TILE + places[entry] : entry;
    }
};

// A list is used if it has all candidates.
template <bool LISTED>
__device__ inline bool holds(const State* state, Word k, long long room) {
    return !LISTED || (state->gathered >= k && state->gathered <= (Word)room);
}

// ---- how many lie before

template <class Element, bool LISTED>
__device__ inline void measure(const Runs<Element, LISTED>& runs, Word k, long long room, unsigned* above,
                               unsigned* equal, Word* groups, State* state) {
    typedef typename Format<Element>::Key Key;
    __shared__ Word found[THREADS];  // above in the high half, equal in the low one
    if (!holds<LISTED>(state, k, room)) return;
    const Key key = (Key)state->key;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const long long end = runs.first(blockIdx.x + 1);
    Word all_above = 0, all_equal = 0, total;
    for (long long tile = runs.first(blockIdx.x); tile < end; tile += THREADS) {
        for (int i = warp; i < THREADS && tile + i < end; i += WARPS) {
            const long long start = runs.start(tile + i);
            const int length = runs.length(tile + i);
            Word sum = 0;
            for (int entry = 0; entry < length; entry += 32) {
                const bool here = entry + lane < length;
                const Key own = here ? Format<Element>::key(runs.x[start + entry + lane]) : 0;
                const unsigned more = __ballot_sync(EVERY_LANE, here && own > key);
                const unsigned same = __ballot_sync(EVERY_LANE, here && own == key);
                sum += (Word)__popc(more) << 32 | (Word)__popc(same);
            }
            if (lane == 0) found[i] = sum;
        }
        __syncthreads();
        const bool has = tile + threadIdx.x < end;
        const Word before = sum_before(has ? found[threadIdx.x] : 0, total);
        if (has) {
            above[tile + threadIdx.x] = (unsigned)(all_above + (before >> 32));
            equal[tile + threadIdx.x] = (unsigned)(all_equal + (before & 0xffffffffu));
        }
        all_above += total >> 32;
        all_equal += total & 0xffffffffu;
    }
    if (threadIdx.x == 0) {
        groups[2 * blockIdx.x] = all_above;
        groups[2 * blockIdx.x + 1] = all_equal;
    }
    if (!ends_last(state)) return;
    const volatile Word* published = groups;  // by other blocks
    Word carried_above = 0, carried_equal = 0;
    for (int group = threadIdx.x; group - (int)threadIdx.x < (int)gridDim.x; group += THREADS) {
        const bool has = group < (int)gridDim.x;
        const Word ahead = carried_above + sum_before(has ? published[2 * group] : 0, total);
        carried_above += total;
        const Word level = carried_equal + sum_before(has ? published[2 * group + 1] : 0, total);
        carried_equal += total;
        if (has) {
            groups[2 * group] = ahead;
            groups[2 * group + 1] = level;
        }
    }
}

// ---- the result, in index order: all above the key, and of those equal to it the first ones

template <class Element, bool LISTED, class Index>
__device__ inline void emit(const Runs<Element, LISTED>& runs, Word k, long long room, int refuses,
                            const unsigned* above, const unsigned* equal, const Word* groups, const State* state,
                            Index* indices, Element* values, Element* residual) {
    typedef typename Format<Element>::Key Key;
    if (!holds<LISTED>(state, k, room) || (refuses && state->nan)) return;
    const Key key = (Key)state->key;
    const Word wanted = state->wanted;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const unsigned lower = (1u << lane) - 1;
    const long long end = runs.first(blockIdx.x + 1);
    for (long long tile = runs.first(blockIdx.x) + warp; tile < end; tile += WARPS) {
        const long long start = runs.start(tile);
        const int length = runs.length(tile);
        Word ahead = groups[2 * blockIdx.x] + above[tile], level = groups[2 * blockIdx.x + 1] + equal[tile];
        for (int entry = 0; entry < length; entry += 32) {
            const bool here = entry + lane < length;
            const Element value = here ? runs.x[start + entry + lane] : Element();
            const Key own = Format<Element>::key(value);
            const unsigned more = __ballot_sync(EVERY_LANE, here && own > key);
            const unsigned same = __ballot_sync(EVERY_LANE, here && own == key);
            const Word rank = level + __popc(same & lower);
            if (here && (own > key || (own == key && rank < wanted))) {
                const Word place = ahead + __popc(more & lower) + (rank < wanted ? rank : wanted);
                const long long index = runs.index(tile, start + entry + lane);
                indices[place] = (Index)index;
                values[place] = value;
                if (residual) residual[index] = Element();
            }
            ahead += __popc(more);
            level += __popc(same);
        }
    }
}

// ---- kernels

#define HISTOGRAM(NAME, ELEMENT, ADDEND)                                                                         \
    extern "C" __global__ void __launch_bounds__(THREADS, 4)                                                     \
        NAME(ELEMENT* x, long long most, const Word* length, int shift, int bits, long long k, Word* counts,     \
             State* state) {                                                                                     \
        histogram(x, ADDEND, most, length, shift, bits, (Word)k, counts, state);                                 \
    }

#define GATHER(NAME, ELEMENT, ADDEND)                                                                            \
    extern "C" __global__ void __launch_bounds__(THREADS, 4)                                                     \
        NAME(ELEMENT* x, long long count, const Word* bound, ELEMENT* values, unsigned short* places,            \
             long long room, Word* starts, unsigned* kept, State* state) {                                       \
        gather(x, ADDEND, count, bound, values, places, room, starts, kept, state);                              \
    }

#define MEASURE(NAME, ELEMENT, LISTED)                                                                           \
    extern "C" __global__ void __launch_bounds__(THREADS, 4)                                                     \
        NAME(ELEMENT* x, const unsigned short* places, long long count, const Word* starts,                      \
             const unsigned* kept, long long k, long long room, unsigned* above, unsigned* equal, Word* groups,  \
             State* state) {                                                                                     \
        const Runs<ELEMENT, LISTED> runs = {x, places, count, starts, kept};                                     \
        measure(runs, (Word)k, room, above, equal, groups, state);                                               \
    }

#define EMIT(NAME, ELEMENT, LISTED, INDEX)                                                                       \
    extern "C" __global__ void __launch_bounds__(THREADS, 4)                                                     \
        NAME(ELEMENT* x, const unsigned short* places, long long count, const Word* starts,                      \
             const unsigned* kept, long long k, long long room, int refuses, const unsigned* above,              \
             const unsigned* equal, const Word* groups, const State* state, INDEX* indices, ELEMENT* values,     \
             ELEMENT* residual) {                                                                                \
        const Runs<ELEMENT, LISTED> runs = {x, places, count, starts, kept};                                     \
        emit(runs, (Word)k, room, refuses, above, equal, groups, state, indices, values, residual);              \
    }
