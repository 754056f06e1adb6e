// Element types of all dtypes, operations that join two elements, and vectors of them; the kernels follow.
//
// Needs no header. Every rounding is written out with an intrinsic, so no compiler fuses or reorders: results have
// numpy's bits (a NaN stays a NaN, its payload may differ). Complex products are those of numpy on processors with FMA.

// ---- element types that C++ lacks

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

// By the reciprocal and one correction, or two for doubles, which give the rounded quotient of normal numbers: for
// floats by every whole number up to 4096 as tried with all 2^23 significands, for doubles by Markstein's theorem. Zeros
// are kept; the rest is divided.
__device__ inline float divided(float a, float by) {
    const float inverse = __frcp_rn(by), near = __fmul_rn(a, inverse);
    const unsigned size = __float_as_uint(a) & 0x7fffffffu, least = 27u << 23;  // 2^-100
    if (size == 0) return a;
    if (size - least >= 0x7f800000u - least || by > 4096) return __fdiv_rn(a, by);
    return __fmaf_rn(__fmaf_rn(-near, by, a), inverse, near);
}
__device__ inline double divided(double a, double by) {
    const double inverse = __drcp_rn(by), near = __dmul_rn(a, inverse);
    const unsigned long long size = (unsigned long long)__double_as_longlong(a) & 0x7fffffffffffffffull;
    const unsigned long long least = 123ull << 52;  // 2^-900
    if (size == 0) return a;
    if (size - least >= 0x7ff0000000000000ull - least) return __ddiv_rn(a, by);
    const double nearer = __fma_rn(__fma_rn(-near, by, a), inverse, near);
    return __fma_rn(__fma_rn(-nearer, by, a), inverse, nearer);
}
__device__ inline float quotient(float a, long long n) { return divided(a, (float)n); }
__device__ inline double quotient(double a, long long n) { return divided(a, (double)n); }
__device__ inline Half quotient(Half a, long long n) {
    return narrowed_half(divided(widened(a), widened(narrowed_half((float)n))));
}
__device__ inline Bfloat16 quotient(Bfloat16 a, long long n) {
    return narrowed_bfloat16(divided(widened(a), widened(narrowed_bfloat16((float)n))));
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

// ---- vectors, the unit of a thread's loads and stores

constexpr int VECTOR = 16;  // bytes

// Vectors in flight: small elements need a register each while they are joined. bfloat16 needs more time for each.
template <class Element>
constexpr int IN_FLIGHT = sizeof(Element) <= 2 ? 2 : 4;
template <>
constexpr int IN_FLIGHT<Bfloat16> = 4;

template <class Element>
union Vector {
    static constexpr int LANES = VECTOR / sizeof(Element);
    static constexpr int BATCH = IN_FLIGHT<Element>;
    uint4 raw;
    Element lane[LANES];
    __device__ Vector() : raw() {}
};
