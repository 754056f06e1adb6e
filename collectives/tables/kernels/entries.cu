// Single entries of an array: a thread for each, so the indices of one launch must differ. feedback.cu precedes, the
// lines of the kernels follow.

// Indices outside of the array are skipped and counted: they come from other machines.

template <class Element, class Index>
__device__ inline void add_entries(Element* total, long long size, const Index* indices, const Element* values,
                                   long long count, Word* outside) {
    for (long long i = (long long)blockIdx.x * THREADS + threadIdx.x; i < count; i += (long long)gridDim.x * THREADS) {
        const long long place = indices[i];
        if (place < 0 || place >= size)
            atomicAdd(outside, (Word)1);
        else
            total[place] = plus(total[place], values[i]);
    }
}

template <class Element, class Index>
__device__ inline void zero_entries(Element* line, const Index* indices, long long count) {
    for (long long i = (long long)blockIdx.x * THREADS + threadIdx.x; i < count; i += (long long)gridDim.x * THREADS)
        line[indices[i]] = 0;
}

// ---- kernels

#define ADD_ENTRIES(NAME, ELEMENT, INDEX)                                                                        \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                        \
        NAME(ELEMENT* total, long long size, const INDEX* indices, const ELEMENT* values, long long count,       \
             Word* outside) {                                                                                    \
        add_entries(total, size, indices, values, count, outside);                                               \
    }

#define ZERO_ENTRIES(NAME, ELEMENT, INDEX)                                                                       \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                        \
        NAME(ELEMENT* line, const INDEX* indices, long long count) {                                             \
        zero_entries(line, indices, count);                                                                      \
    }
