// Joins and copies of many chunks in one launch; arithmetic.cu precedes, the lines of the kernels follow. See
// kernel_launch.py for the tables.

constexpr int THREADS = 256;
constexpr int PER_THREAD = 4;   // vectors of a tile

struct Item {
    long long destination, own, count;  // bytes, bytes, elements
    int destination_buffer, own_buffer;
    int first, arriving;  // its arrivals: first, first + 1, ...
};

struct Arrival {
    long long offset;  // bytes
    long long buffer;
};

struct Tile {
    int item, number;
};

// ---- one tile: THREADS x PER_THREAD vectors of one item

template <class Element, class Operation>
struct Join {
    char* const* bases;
    const Arrival* arrivals;
    int arriving;

    __device__ const Element* arrival(int k) const {
        return in_global_memory((const Element*)(bases[arrivals[k].buffer] + arrivals[k].offset));
    }

    __device__ bool aligned_with(const Element* destination) const {
#pragma unroll 1
        for (int k = 0; k < arriving; ++k)
            if (((unsigned long long)arrival(k) ^ (unsigned long long)destination) % VECTOR) return false;
        return true;
    }

    __device__ Element one(const Element* own, long long i) const {
        Element value = own[i];
#pragma unroll 1
        for (int k = 0; k < arriving; ++k) value = Operation::join(value, arrival(k)[i]);
        return value;
    }

    template <int BATCH>
    __device__ void vectors(Vector<Element> (&value)[BATCH], long long head, const long long (&place)[BATCH],
                            long long end) const {
#pragma unroll 1
        for (int k = 0; k < arriving; ++k) {
            const uint4* from = (const uint4*)(arrival(k) + head);
            Vector<Element> other[BATCH];
#pragma unroll
            for (int u = 0; u < BATCH; ++u)
                if (place[u] < end) other[u].raw = from[place[u]];
#pragma unroll
            for (int u = 0; u < BATCH; ++u)
#pragma unroll
                for (int l = 0; l < Vector<Element>::LANES; ++l)
                    value[u].lane[l] = Operation::join(value[u].lane[l], other[u].lane[l]);
        }
    }
};

template <class Element>
struct Divide {
    long long divisor;

    __device__ bool aligned_with(const Element*) const { return true; }
    __device__ Element one(const Element* own, long long i) const { return quotient(own[i], divisor); }
    template <int BATCH>
    __device__ void vectors(Vector<Element> (&value)[BATCH], long long, const long long (&)[BATCH],
                            long long) const {
#pragma unroll
        for (int u = 0; u < BATCH; ++u)
#pragma unroll
            for (int l = 0; l < Vector<Element>::LANES; ++l)
                value[u].lane[l] = quotient(value[u].lane[l], divisor);
    }
};

template <class Element, class Task>
__device__ void do_tile(const Task& task, Element* destination, const Element* own, long long count,
                        long long number) {
    destination = in_global_memory(destination);
    own = in_global_memory(own);
    constexpr int LANES = Vector<Element>::LANES;
    constexpr int BATCH = Vector<Element>::BATCH;
    const long long first = number * THREADS * PER_THREAD;
    const unsigned long long address = (unsigned long long)destination;
    // Elements one by one: all of the tile, or with whole vectors the first and last of the item.
    long long begin = first * LANES;
    long long until = begin + THREADS * PER_THREAD * LANES < count ? begin + THREADS * PER_THREAD * LANES : count;
    long long head = until, skipped = 0;
    if ((address ^ (unsigned long long)own) % VECTOR == 0 && task.aligned_with(destination)) {
        const long long ahead = (long long)((VECTOR - address % VECTOR) % VECTOR / sizeof(Element));
        head = ahead < count ? ahead : count;
        const long long end = (count - head) / LANES;
#pragma unroll 1
        for (int batch = 0; batch < PER_THREAD; batch += BATCH) {
            long long place[BATCH];
            Vector<Element> value[BATCH];
#pragma unroll
            for (int u = 0; u < BATCH; ++u) place[u] = first + (batch + u) * THREADS + threadIdx.x;
#pragma unroll
            for (int u = 0; u < BATCH; ++u)
                if (place[u] < end) value[u].raw = ((const uint4*)(own + head))[place[u]];
            task.vectors(value, head, place, end);
#pragma unroll
            for (int u = 0; u < BATCH; ++u)
                if (place[u] < end) ((uint4*)(destination + head))[place[u]] = value[u].raw;
        }
        skipped = end * LANES;
        begin = 0;
        until = number == 0 ? count - skipped : 0;
    }
#pragma unroll 1
    for (long long i = begin + threadIdx.x; i < until; i += THREADS) {
        const long long place = i < head ? i : i + skipped;
        destination[place] = task.one(own, place);
    }
}

// ---- kernels: every block takes every gridDim.x-th tile

#define JOIN(NAME, ELEMENT, OPERATION)                                                                          \
    extern "C" __global__ void __launch_bounds__(THREADS, 3)                                                       \
        NAME(char* const* bases, const Item* items, const Arrival* arrivals, const Tile* tiles, int count) {    \
        for (int t = blockIdx.x; t < count; t += gridDim.x) {                                                   \
            const Tile tile = tiles[t];                                                                         \
            const Item item = items[tile.item];                                                                 \
            const Join<ELEMENT, OPERATION> task = {bases, arrivals + item.first, item.arriving};                \
            do_tile(task, (ELEMENT*)(bases[item.destination_buffer] + item.destination),                        \
                    (const ELEMENT*)(bases[item.own_buffer] + item.own), item.count, tile.number);              \
        }                                                                                                       \
    }

#define DIVIDE(NAME, ELEMENT)                                                                                   \
    extern "C" __global__ void __launch_bounds__(THREADS, 3)                                                       \
        NAME(ELEMENT* line, long long count, long long divisor, int tiles) {                                    \
        const Divide<ELEMENT> task = {divisor};                                                                 \
        for (int t = blockIdx.x; t < tiles; t += gridDim.x) do_tile(task, line, line, count, t);                \
    }
