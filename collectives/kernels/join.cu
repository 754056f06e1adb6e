// Joins and copies of many chunks in one launch; see work.py for the tables and source.py for how this is compiled.
//
// Needs no header. Every rounding is written out with an intrinsic, so no compiler fuses or reorders: results have
// numpy's bits (of NaN only that it is one). Complex products are those of numpy where the processor has FMA.

constexpr int THREADS = 256;
constexpr int VECTOR = 16;      // bytes
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

// ---- types of elements that C++ does not have

struct Half {
    unsigned short bits;
};

struct Bfloat16 {
    unsigned short bits;
};

struct Truth {
    unsigned char value;
};

template <class Real>
struct alignas(2 * sizeof(Real)) Complex {
    Real real, imaginary;
};

struct alignas(16) Bytes16 {
    unsigned long long low, high;
};

#ifdef __CUDACC__
__device__ inline float widened(Half value) {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value.bits));
    return wide;
}

__device__ inline Half narrowed_half(float wide) {
    Half value;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(value.bits) : "f"(wide));
    return value;
}

template <class Pointer>
__device__ inline Pointer in_global_memory(Pointer pointer) {
    __builtin_assume(__isGlobal(pointer));
    return pointer;
}
#endif

__device__ inline float widened(Bfloat16 value) { return __uint_as_float((unsigned)value.bits << 16); }

__device__ inline Bfloat16 narrowed_bfloat16(float wide) {
    const unsigned bits = __float_as_uint(wide);
    Bfloat16 value;
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        value.bits = (unsigned short)(bits >> 16 | 0x40u);
    else
        value.bits = (unsigned short)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
    return value;
}

// ---- arithmetic: unsigned for integers, so that they wrap around

template <class Integer>
__device__ inline Integer plus(Integer a, Integer b) {
    return (Integer)((unsigned long long)a + (unsigned long long)b);
}
__device__ inline float plus(float a, float b) { return __fadd_rn(a, b); }
__device__ inline double plus(double a, double b) { return __dadd_rn(a, b); }
__device__ inline Half plus(Half a, Half b) { return narrowed_half(__fadd_rn(widened(a), widened(b))); }
__device__ inline Bfloat16 plus(Bfloat16 a, Bfloat16 b) {
    return narrowed_bfloat16(__fadd_rn(widened(a), widened(b)));
}
template <class Real>
__device__ inline Complex<Real> plus(Complex<Real> a, Complex<Real> b) {
    return {plus(a.real, b.real), plus(a.imaginary, b.imaginary)};
}

template <class Integer>
__device__ inline Integer times(Integer a, Integer b) {
    return (Integer)((unsigned long long)a * (unsigned long long)b);
}
__device__ inline float times(float a, float b) { return __fmul_rn(a, b); }
__device__ inline double times(double a, double b) { return __dmul_rn(a, b); }
__device__ inline Half times(Half a, Half b) { return narrowed_half(__fmul_rn(widened(a), widened(b))); }
__device__ inline Bfloat16 times(Bfloat16 a, Bfloat16 b) {
    return narrowed_bfloat16(__fmul_rn(widened(a), widened(b)));
}
__device__ inline float times_plus(float a, float b, float c) { return __fmaf_rn(a, b, c); }
__device__ inline double times_plus(double a, double b, double c) { return __fma_rn(a, b, c); }
template <class Real>
__device__ inline Complex<Real> times(Complex<Real> a, Complex<Real> b) {
    return {times_plus(a.real, b.real, -times(a.imaginary, b.imaginary)),
            times_plus(a.real, b.imaginary, times(a.imaginary, b.real))};
}

// numpy takes the second of two equal floats and doubles, the first of two equal halves: it shows in zeros.
template <class Element>
__device__ inline bool above(Element a, Element b) {
    return a > b;
}
__device__ inline bool above(float a, float b) { return a > b || a != a; }
__device__ inline bool above(double a, double b) { return a > b || a != a; }
__device__ inline bool above(Half a, Half b) { return widened(a) >= widened(b) || widened(a) != widened(a); }
__device__ inline bool above(Bfloat16 a, Bfloat16 b) { return above(widened(a), widened(b)); }

template <class Element>
__device__ inline bool below(Element a, Element b) {
    return a < b;
}
__device__ inline bool below(float a, float b) { return a < b || a != a; }
__device__ inline bool below(double a, double b) { return a < b || a != a; }
__device__ inline bool below(Half a, Half b) { return widened(a) <= widened(b) || widened(a) != widened(a); }
__device__ inline bool below(Bfloat16 a, Bfloat16 b) { return below(widened(a), widened(b)); }

struct Sum {
    template <class Element>
    __device__ static Element join(Element a, Element b) {
        return plus(a, b);
    }
};

struct Prod {
    template <class Element>
    __device__ static Element join(Element a, Element b) {
        return times(a, b);
    }
};

struct Max {
    template <class Element>
    __device__ static Element join(Element a, Element b) {
        return above(a, b) ? a : b;
    }
    __device__ static Truth join(Truth a, Truth b) { return {(unsigned char)((a.value != 0) | (b.value != 0))}; }
};

struct Min {
    template <class Element>
    __device__ static Element join(Element a, Element b) {
        return below(a, b) ? a : b;
    }
    __device__ static Truth join(Truth a, Truth b) { return {(unsigned char)((a.value != 0) & (b.value != 0))}; }
};

struct Copy {
    template <class Element>
    __device__ static Element join(Element, Element b) {
        return b;
    }
};

// ---- averages: numpy's quotient by a whole number in the elements' own type

__device__ inline float quotient(float a, long long n) { return __fdiv_rn(a, (float)n); }
__device__ inline double quotient(double a, long long n) { return __ddiv_rn(a, (double)n); }
__device__ inline Half quotient(Half a, long long n) {
    return narrowed_half(__fdiv_rn(widened(a), widened(narrowed_half((float)n))));
}
__device__ inline Bfloat16 quotient(Bfloat16 a, long long n) {
    return narrowed_bfloat16(__fdiv_rn(widened(a), widened(narrowed_bfloat16((float)n))));
}
// numpy multiplies complex numbers by the reciprocal, and adds the other component times zero.
template <class Real>
__device__ inline Complex<Real> quotient(Complex<Real> a, long long n) {
    const Real scale = quotient((Real)1, n);
    const Real zero = 0;
    return {times(plus(a.real, times(a.imaginary, zero)), scale),
            times(plus(a.imaginary, -times(a.real, zero)), scale)};
}
__device__ inline unsigned long long quotient(unsigned long long a, long long n) {
    return a / (unsigned long long)n;
}
template <class Integer>
__device__ inline Integer quotient(Integer a, long long n) {
    return (Integer)((long long)a / n);
}

// ---- one tile: THREADS x PER_THREAD vectors of one item

template <class Element>
union Vector {
    static constexpr int LANES = VECTOR / sizeof(Element);
    // vectors in flight: small elements need a register each while they are joined
    static constexpr int BATCH = sizeof(Element) <= 2 ? 2 : 4;
    uint4 raw;
    Element lane[LANES];
    __device__ Vector() : raw() {}
};

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
    // Elements one by one: those of the tile, or where whole vectors can be used the first and last of the item.
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
