// What each PTX instruction computes that touches registers only, by its name.
//
// A register is a word of 64 bits, of which an instruction reads as many as its type has. Every rounding is that of IEEE
// 754 (compile with -ffp-contract=off); an operation whose rounding or fusion PTX leaves to the assembler, such as a plain
// add.f32, is not here. A NaN that arises is PTX's canonical one where PTX names one.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

typedef uint64_t Word;

struct Instruction {
    int32_t operation, kind;
    int32_t d[4], s[4];        // registers: results, operands
    int64_t offset;            // of an address
    int32_t guard, negated;    // a predicate's register or -1
    int32_t target;            // of a branch
    int32_t place;             // of the instruction in the program
    int32_t space, size, count, extends;      // of an access: bytes of an element, elements, sign
    int32_t strength, scope, reads, writes;   // of an access or a fence
    int32_t proxy, unused;                    // of an access
};

typedef void (*Compute)(Word*, const Instruction&);

template <class T>
static inline T get(const Word* r, int place) {
    T value;
    std::memcpy(&value, r + place, sizeof value);
    return value;
}

template <class T>
static inline void set(Word* r, int place, T value) {
    if constexpr (std::is_floating_point_v<T>) {
        r[place] = 0;
        std::memcpy(r + place, &value, sizeof value);
    } else {
        r[place] = std::is_signed_v<T> ? (Word)(int64_t)value : (Word)value;
    }
}

// ---- floats

static inline float bits_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t float_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float flushed(float value) {
    const uint32_t bits = float_bits(value);
    return bits & 0x7f800000u ? value : bits_float(bits & 0x80000000u);
}

static inline float canonical(float value) { return value != value ? bits_float(0x7fffffffu) : value; }
static inline double canonical(double value) { return value; }

static inline float widened(uint16_t half) {
    const uint32_t sign = (uint32_t)(half & 0x8000u) << 16, magnitude = half & 0x7fffu;
    if (magnitude > 0x7c00u) return bits_float(0x7fffffffu);
    if (magnitude == 0x7c00u) return bits_float(sign | 0x7f800000u);
    const float value = std::ldexp((float)(magnitude & 0x3ffu | (magnitude >> 10 ? 0x400u : 0)),
                                   (int)(magnitude >> 10 ? magnitude >> 10 : 1) - 25);
    return bits_float(sign | float_bits(value));
}

static inline uint16_t narrowed(float wide) {
    const uint32_t bits = float_bits(wide), magnitude = bits & 0x7fffffffu;
    const uint16_t sign = (uint16_t)(bits >> 16 & 0x8000u);
    if (magnitude > 0x7f800000u) return 0x7fff;
    if (magnitude >= 0x477ff000u) return sign | 0x7c00u;  // from 65520 on
    if (magnitude < 0x38800000u)                          // a multiple of 2**-24; nearbyint takes the even one
        return sign | (uint16_t)std::nearbyint(std::ldexp(bits_float(magnitude), 24));
    return sign | (uint16_t)((magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13);
}

template <class F>
static inline F least(F a, F b) {
    if (a != a || b != b) return canonical(a != a ? b : a);
    return a < b || (a == b && std::signbit(a)) ? a : b;
}

template <class F>
static inline F greatest(F a, F b) {
    if (a != a || b != b) return canonical(a != a ? b : a);
    return a > b || (a == b && !std::signbit(a)) ? a : b;
}

// A float to an integer: what is too large becomes the nearest end, NaN zero.
template <class I, class F>
static inline I whole(F value) {
    if (value != value) return 0;
    if (value <= (F)std::numeric_limits<I>::min()) return std::numeric_limits<I>::min();
    if (value >= (F)std::numeric_limits<I>::max()) return std::numeric_limits<I>::max();
    return (I)value;
}

// ---- integers

template <class To, class From>
static inline To saturated(From value) {
    typedef std::numeric_limits<To> Ends;
    if constexpr (std::is_signed_v<From>) {
        if (value < 0) {
            if (!std::is_signed_v<To>) return 0;
            return (int64_t)value < (int64_t)Ends::min() ? Ends::min() : (To)value;
        }
    }
    return (Word)value > (Word)Ends::max() ? Ends::max() : (To)value;
}

template <class I>
static inline I quotient(I a, I b) {
    if (b == 0) return (I)~(I)0;
    if (std::is_signed_v<I> && b == (I)-1) return (I)(0 - (Word)a);
    return a / b;
}

template <class I>
static inline I remainder(I a, I b) {
    if (b == 0) return a;
    if (std::is_signed_v<I> && b == (I)-1) return 0;
    return a % b;
}

template <class U>
static inline U left(U a, uint32_t by) {
    return by >= 8 * sizeof(U) ? 0 : (U)(a << by);
}

template <class I>
static inline I right(I a, uint32_t by) {
    const uint32_t most = 8 * sizeof(I) - 1;
    return by > most ? (std::is_signed_v<I> ? (I)(a >> most) : 0) : (I)(a >> by);
}

template <class U>
static inline U reversed(U value) {
    U bits = 0;
    for (unsigned i = 0; i < 8 * sizeof(U); ++i) bits |= (value >> i & 1) << (8 * sizeof(U) - 1 - i);
    return bits;
}

template <class U>
static inline uint32_t leading_zeros(U value) {
    uint32_t zeros = 0;
    for (U bit = (U)1 << (8 * sizeof(U) - 1); bit && !(value & bit); bit >>= 1) ++zeros;
    return zeros;
}

// The place of the highest bit that differs from the sign, and how far it is from the top.
template <class I>
static inline uint32_t found_bit(I value, bool from_top) {
    typedef std::make_unsigned_t<I> U;
    const U bits = std::is_signed_v<I> && value < 0 ? ~(U)value : (U)value;
    if (!bits) return 0xffffffffu;
    const uint32_t zeros = leading_zeros(bits);
    return from_top ? zeros : 8 * sizeof(I) - 1 - zeros;
}

template <class I>
static inline I extracted(I value, uint32_t first, uint32_t length) {
    typedef std::make_unsigned_t<I> U;
    const uint32_t most = 8 * sizeof(I) - 1;
    first &= 0xff, length &= 0xff;
    const uint32_t top = first + length - 1 < most ? first + length - 1 : most;
    const bool filled = std::is_signed_v<I> && length && ((U)value >> top & 1);
    U bits = 0;
    for (uint32_t i = 0; i <= most; ++i) {
        const bool bit = i < length && first + i <= most ? (U)value >> (first + i) & 1 : filled;
        bits |= (U)bit << i;
    }
    return (I)bits;
}

template <class U>
static inline U inserted(U from, U into, uint32_t first, uint32_t length) {
    first &= 0xff, length &= 0xff;
    for (uint32_t i = 0; i < length && first + i < 8 * sizeof(U); ++i) {
        const U bit = (U)1 << (first + i);
        into = (from >> i & 1) ? (U)(into | bit) : (U)(into & ~bit);
    }
    return into;
}

static inline uint32_t permuted(uint32_t a, uint32_t b, uint32_t selector) {
    const Word bytes = (Word)b << 32 | a;
    uint32_t result = 0;
    for (int i = 0; i < 4; ++i) {
        const uint32_t choice = selector >> 4 * i & 15;
        uint32_t byte = (uint32_t)(bytes >> 8 * (choice & 7)) & 0xff;
        if (choice & 8) byte = byte & 0x80 ? 0xff : 0;
        result |= byte << 8 * i;
    }
    return result;
}

static inline uint32_t logic(uint32_t a, uint32_t b, uint32_t c, uint32_t table) {
    uint32_t result = 0;
    for (int i = 0; i < 8; ++i)
        if (table >> i & 1) result |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
    return result;
}

static inline uint32_t funnel(uint32_t low, uint32_t high, uint32_t by, bool to_left, bool wraps) {
    by = wraps ? by & 31 : by > 32 ? 32 : by;
    const Word both = (Word)high << 32 | low;
    return to_left ? (uint32_t)(both << by >> 32) : (uint32_t)(both >> by);
}

template <class I>
static inline I high_half(I a, I b) {
    typedef std::conditional_t<std::is_signed_v<I>, __int128, unsigned __int128> Wide;
    return (I)((Wide)a * (Wide)b >> 8 * sizeof(I));
}

// ---- the table

struct Named {
    const char* name;
    Compute compute;
};

#define OP(NAME, T, VALUE) {NAME, [](Word* r, const Instruction& i) { set<T>(r, i.d[0], (T)(VALUE)); }},
#define A(T) get<T>(r, i.s[0])
#define B(T) get<T>(r, i.s[1])
#define C(T) get<T>(r, i.s[2])
#define D(T) get<T>(r, i.s[3])

#define COMPARED(N, T) \
    OP("setp.eq." N, bool, A(T) == B(T)) OP("setp.ne." N, bool, A(T) != B(T))
#define ORDERED(N, T)                                                                     \
    COMPARED(N, T) OP("setp.lt." N, bool, A(T) < B(T)) OP("setp.le." N, bool, A(T) <= B(T)) \
    OP("setp.gt." N, bool, A(T) > B(T)) OP("setp.ge." N, bool, A(T) >= B(T))

#define INTEGER(N, T)                                                                                  \
    OP("add." N, T, (Word)A(T) + (Word)B(T)) OP("sub." N, T, (Word)A(T) - (Word)B(T))                  \
    OP("mul.lo." N, T, (Word)A(T) * (Word)B(T)) OP("mul.hi." N, T, high_half<T>(A(T), B(T)))           \
    OP("mad.lo." N, T, (Word)A(T) * (Word)B(T) + (Word)C(T))                                           \
    OP("mad.hi." N, T, (Word)high_half<T>(A(T), B(T)) + (Word)C(T))                                    \
    OP("div." N, T, quotient<T>(A(T), B(T))) OP("rem." N, T, remainder<T>(A(T), B(T)))                 \
    OP("min." N, T, A(T) < B(T) ? A(T) : B(T)) OP("max." N, T, A(T) > B(T) ? A(T) : B(T))              \
    OP("shr." N, T, right<T>(A(T), B(uint32_t))) OP("mov." N, T, A(T))                                 \
    OP("selp." N, T, C(bool) ? A(T) : B(T)) ORDERED(N, T)
#define SIGNED(N, T) \
    INTEGER(N, T) OP("neg." N, T, 0 - (Word)A(T)) OP("abs." N, T, A(T) < 0 ? 0 - (Word)A(T) : (Word)A(T))
#define UNSIGNED(N, T)                                                                              \
    INTEGER(N, T) OP("setp.lo." N, bool, A(T) < B(T)) OP("setp.ls." N, bool, A(T) <= B(T))           \
    OP("setp.hi." N, bool, A(T) > B(T)) OP("setp.hs." N, bool, A(T) >= B(T))
#define WIDENING(N, T, W) \
    OP("mul.wide." N, W, (W)A(T) * (W)B(T)) OP("mad.wide." N, W, (Word)((W)A(T) * (W)B(T)) + (Word)C(W))
#define BITS(N, T)                                                                                     \
    OP("and." N, T, A(T) & B(T)) OP("or." N, T, A(T) | B(T)) OP("xor." N, T, A(T) ^ B(T))              \
    OP("not." N, T, ~A(T)) OP("cnot." N, T, A(T) ? 0 : 1) OP("shl." N, T, left<T>(A(T), B(uint32_t)))  \
    OP("shr." N, T, right<T>(A(T), B(uint32_t))) OP("mov." N, T, A(T))                                 \
    OP("selp." N, T, C(bool) ? A(T) : B(T)) COMPARED(N, T)
#define COUNTED(N, T)                                                                                \
    OP("popc." N, uint32_t, __builtin_popcountll(A(T))) OP("clz." N, uint32_t, leading_zeros<T>(A(T))) \
    OP("brev." N, T, reversed<T>(A(T)))                                                              \
    OP("bfi." N, T, inserted<T>(A(T), B(T), C(uint32_t), D(uint32_t)))
#define FOUND(N, T)                                                   \
    OP("bfind." N, uint32_t, found_bit<T>(A(T), false))               \
    OP("bfind.shiftamt." N, uint32_t, found_bit<T>(A(T), true))       \
    OP("bfe." N, T, extracted<T>(A(T), B(uint32_t), C(uint32_t)))

// F makes an operand or a result of a register's value: as it is, or flushed.
#define FLOAT(N, T, F)                                                                                       \
    OP("add.rn" N, T, F(canonical(F(A(T)) + F(B(T))))) OP("sub.rn" N, T, F(canonical(F(A(T)) - F(B(T)))))     \
    OP("mul.rn" N, T, F(canonical(F(A(T)) * F(B(T))))) OP("div.rn" N, T, F(canonical(F(A(T)) / F(B(T)))))     \
    OP("fma.rn" N, T, F(canonical(std::fma(F(A(T)), F(B(T)), F(C(T))))))                                     \
    OP("rcp.rn" N, T, F(canonical((T)1 / F(A(T))))) OP("sqrt.rn" N, T, F(canonical(std::sqrt(F(A(T))))))      \
    OP("min" N, T, least<T>(F(A(T)), F(B(T)))) OP("max" N, T, greatest<T>(F(A(T)), F(B(T))))                 \
    OP("neg" N, T, -F(A(T))) OP("abs" N, T, std::fabs(F(A(T))))                                              \
    RELATION("eq" N, T, F, a == b) RELATION("ne" N, T, F, a < b || a > b) RELATION("lt" N, T, F, a < b)       \
    RELATION("le" N, T, F, a <= b) RELATION("gt" N, T, F, a > b) RELATION("ge" N, T, F, a >= b)               \
    RELATION("equ" N, T, F, !(a < b || a > b)) RELATION("neu" N, T, F, !(a == b))                            \
    RELATION("ltu" N, T, F, !(a >= b)) RELATION("leu" N, T, F, !(a > b)) RELATION("gtu" N, T, F, !(a <= b))   \
    RELATION("geu" N, T, F, !(a < b)) RELATION("num" N, T, F, a == a && b == b)                              \
    RELATION("nan" N, T, F, a != a || b != b)
#define RELATION(N, T, F, TRUE)                                      \
    {"setp." N, [](Word* r, const Instruction& i) {                  \
         const T a = F(A(T)), b = F(B(T));                           \
         set<bool>(r, i.d[0], TRUE);                                 \
     }},
#define MOVED(N, T) OP("mov." N, T, A(T)) OP("selp." N, T, C(bool) ? A(T) : B(T))
#define SAME(VALUE) (VALUE)

#define CONVERTED(TO, T, FROM, S) \
    OP("cvt." TO "." FROM, T, A(S)) OP("cvt.sat." TO "." FROM, T, (saturated<T, S>(A(S))))
#define INTEGERS_FROM(FROM, S)                                                                                \
    CONVERTED("u8", uint8_t, FROM, S) CONVERTED("u16", uint16_t, FROM, S) CONVERTED("u32", uint32_t, FROM, S)  \
    CONVERTED("u64", uint64_t, FROM, S) CONVERTED("s8", int8_t, FROM, S) CONVERTED("s16", int16_t, FROM, S)    \
    CONVERTED("s32", int32_t, FROM, S) CONVERTED("s64", int64_t, FROM, S)                                     \
    OP("cvt.rn.f32." FROM, float, A(S)) OP("cvt.rn.f64." FROM, double, A(S))
#define ROUNDED_TO(TO, T, FROM, S)                                                                            \
    OP("cvt.rzi." TO "." FROM, T, (whole<T, S>(std::trunc(A(S)))))                                            \
    OP("cvt.rni." TO "." FROM, T, (whole<T, S>(std::nearbyint(A(S)))))                                        \
    OP("cvt.rmi." TO "." FROM, T, (whole<T, S>(std::floor(A(S)))))                                            \
    OP("cvt.rpi." TO "." FROM, T, (whole<T, S>(std::ceil(A(S)))))
#define INTEGERS_OF(FROM, S)                                                               \
    ROUNDED_TO("u32", uint32_t, FROM, S) ROUNDED_TO("s32", int32_t, FROM, S)               \
    ROUNDED_TO("u64", uint64_t, FROM, S) ROUNDED_TO("s64", int64_t, FROM, S)

static const Named OPERATIONS[] = {
    SIGNED("s16", int16_t) SIGNED("s32", int32_t) SIGNED("s64", int64_t)
    UNSIGNED("u16", uint16_t) UNSIGNED("u32", uint32_t) UNSIGNED("u64", uint64_t)
    WIDENING("s16", int16_t, int32_t) WIDENING("u16", uint16_t, uint32_t)
    WIDENING("s32", int32_t, int64_t) WIDENING("u32", uint32_t, uint64_t)
    BITS("b16", uint16_t) BITS("b32", uint32_t) BITS("b64", uint64_t)
    COUNTED("b32", uint32_t) COUNTED("b64", uint64_t)
    FOUND("u32", uint32_t) FOUND("s32", int32_t) FOUND("u64", uint64_t) FOUND("s64", int64_t)
    OP("and.pred", bool, A(bool) && B(bool)) OP("or.pred", bool, A(bool) || B(bool))
    OP("xor.pred", bool, A(bool) != B(bool)) OP("not.pred", bool, !A(bool)) OP("mov.pred", bool, A(bool))
    OP("prmt.b32", uint32_t, permuted(A(uint32_t), B(uint32_t), C(uint32_t)))
    OP("lop3.b32", uint32_t, logic(A(uint32_t), B(uint32_t), C(uint32_t), D(uint32_t)))
    OP("shf.l.wrap.b32", uint32_t, funnel(A(uint32_t), B(uint32_t), C(uint32_t), true, true))
    OP("shf.l.clamp.b32", uint32_t, funnel(A(uint32_t), B(uint32_t), C(uint32_t), true, false))
    OP("shf.r.wrap.b32", uint32_t, funnel(A(uint32_t), B(uint32_t), C(uint32_t), false, true))
    OP("shf.r.clamp.b32", uint32_t, funnel(A(uint32_t), B(uint32_t), C(uint32_t), false, false))
    FLOAT(".f32", float, SAME) FLOAT(".ftz.f32", float, flushed) FLOAT(".f64", double, SAME)
    MOVED("f32", float) MOVED("f64", double)
    INTEGERS_FROM("u8", uint8_t) INTEGERS_FROM("u16", uint16_t) INTEGERS_FROM("u32", uint32_t)
    INTEGERS_FROM("u64", uint64_t) INTEGERS_FROM("s8", int8_t) INTEGERS_FROM("s16", int16_t)
    INTEGERS_FROM("s32", int32_t) INTEGERS_FROM("s64", int64_t)
    INTEGERS_OF("f32", float) INTEGERS_OF("f64", double)
    OP("cvt.f64.f32", double, A(float)) OP("cvt.ftz.f64.f32", double, flushed(A(float)))
    OP("cvt.rn.f32.f64", float, canonical((float)A(double)))
    OP("cvt.rn.ftz.f32.f64", float, flushed(canonical((float)A(double))))
    OP("cvt.f32.f16", float, widened(A(uint16_t))) OP("cvt.ftz.f32.f16", float, widened(A(uint16_t)))
    OP("cvt.f64.f16", double, widened(A(uint16_t)))
    OP("cvt.rn.f16.f32", uint16_t, narrowed(A(float)))
    OP("cvt.rn.ftz.f16.f32", uint16_t, narrowed(flushed(A(float))))
    // a register of several parts
    OP("join.2.b32", uint32_t, A(uint16_t) | (uint32_t)B(uint16_t) << 16)
    OP("join.2.b64", Word, A(uint32_t) | (Word)B(uint32_t) << 32)
    OP("join.4.b64", Word, A(uint16_t) | (Word)B(uint16_t) << 16 | (Word)C(uint16_t) << 32 | (Word)D(uint16_t) << 48)
    {"split.2.b32", [](Word* r, const Instruction& i) {
         const Word value = A(uint32_t);
         for (int k = 0; k < 2; ++k) r[i.d[k]] = value >> 16 * k & 0xffff;
     }},
    {"split.2.b64", [](Word* r, const Instruction& i) {
         const Word value = A(Word);
         for (int k = 0; k < 2; ++k) r[i.d[k]] = value >> 32 * k & 0xffffffffu;
     }},
    {"split.4.b64", [](Word* r, const Instruction& i) {
         const Word value = A(Word);
         for (int k = 0; k < 4; ++k) r[i.d[k]] = value >> 16 * k & 0xffff;
     }},
};
