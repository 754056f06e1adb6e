// Gathering of candidates, a list of all elements at or above a bound: select.cu precedes, emit.cu follows.

// The list holds a run for every tile, in index order within it; `starts` and `kept` locate it. Entries beyond the
// capacity are only counted.
template <class Element, class Addend>
__device__ inline void gather(Element* x, Addend addend, long long count, const Word* bound, Element* values,
                              unsigned short* places, long long room, Word* starts, unsigned* kept, State* state) {
    typedef typename Format<Element>::Key Key;
    constexpr int LANES = Pack<Element>::LANES;
    constexpr unsigned LANE_BITS = (1u << LANES) - 1;
    __shared__ Word start;
    x = in_global_memory(x);
    addend = addend.in_global();
    const Key least = *bound < (Key)~(Key)0 ? (Key)*bound : (Key)~(Key)0;
    Key greatest = 0;
    for (long long tile = blockIdx.x; tile * Pack<Element>::TILE < count; tile += gridDim.x) {
        const long long first = tile * Pack<Element>::TILE;
        const int size = size_of<Element>(tile, count);
        Pack<Element> pack[VECTORS];
        read_tile(pack, x, addend, first, size);
        unsigned chosen = 0;  // a bit for each element of this thread
        Word mine = 0;        // 16 bits for each vector
#pragma unroll
        for (int v = 0; v < VECTORS; ++v)
#pragma unroll
            for (int l = 0; l < LANES; ++l) {
                if (place_of<Element>(v) + l >= size) continue;
                const Key key = Format<Element>::key(pack[v].lane[l]);
                greatest = key > greatest ? key : greatest;
                if (key >= least) chosen |= 1u << (v * LANES + l);
            }
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) mine |= (Word)__popc(chosen >> v * LANES & LANE_BITS) << 16 * v;
        Word all;
        const Word before = sum_before(mine, all);
        if (threadIdx.x == 0) {
            unsigned total = 0;
#pragma unroll
            for (int v = 0; v < VECTORS; ++v) total += (unsigned)(all >> 16 * v & 0xffff);
            start = total ? atomicAdd(&state->gathered, (Word)total) : 0;
            starts[tile] = start;
            kept[tile] = total;
        }
        if (!all) continue;
        __syncthreads();
        long long base = (long long)start;
#pragma unroll 1
        for (int v = 0; v < VECTORS; ++v) {
            long long at = base + (long long)(before >> 16 * v & 0xffff);
            // few are chosen: reading them again from the cache costs less than keeping all in registers
            for (unsigned rest = chosen >> v * LANES & LANE_BITS; rest; rest &= rest - 1, ++at) {
                const int place = place_of<Element>(v) + __ffs((int)rest) - 1;
                if (at >= room) break;
                values[at] = x[first + place];
                places[at] = (unsigned short)place;
            }
            base += (long long)(all >> 16 * v & 0xffff);
        }
    }
    if (greatest > Format<Element>::INFINITE) atomicExch(&state->nan, (Word)1);
}
