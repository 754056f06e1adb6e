// What atomic operations make of a word, and multimem instructions of the values of all ranks, by their names.
//
// A reduction takes the values in the order that they come in. Halves of two kinds lie in pairs: without `.acc::f32` each
// sum of theirs is rounded at once, with it only the last one.

typedef Word (*Combine)(Word old, Word a, Word b);

struct Atomic {
    const char* name;
    Combine combine;
};

#define ATOMIC(NAME, T, VALUE)                                                             \
    {NAME, [](Word before, Word first, Word second) -> Word {                              \
         const T old = get<T>(&before, 0), a = get<T>(&first, 0), b = get<T>(&second, 0);  \
         (void)old, (void)a, (void)b;                                                      \
         Word made = 0;                                                                    \
         set<T>(&made, 0, (T)(VALUE));                                                     \
         return made;                                                                      \
     }},
#define ATOMIC_NUMBER(N, T) \
    ATOMIC("add." N, T, old + a) ATOMIC("min." N, T, a < old ? a : old) ATOMIC("max." N, T, a > old ? a : old)
#define ATOMIC_BITS(N, T)                                                                       \
    ATOMIC("exch." N, T, a) ATOMIC("cas." N, T, old == a ? b : old) ATOMIC("and." N, T, old & a) \
    ATOMIC("or." N, T, old | a) ATOMIC("xor." N, T, old ^ a)

static const Atomic ATOMICS[] = {
    ATOMIC_NUMBER("u32", uint32_t) ATOMIC_NUMBER("s32", int32_t) ATOMIC_NUMBER("u64", uint64_t)
    ATOMIC_NUMBER("s64", int64_t) ATOMIC_BITS("b32", uint32_t) ATOMIC_BITS("b64", uint64_t)
    ATOMIC("inc.u32", uint32_t, old >= a ? 0 : old + 1) ATOMIC("dec.u32", uint32_t, old == 0 || old > a ? a : old - 1)
    ATOMIC("add.f32", float, flushed(canonical(flushed(old) + flushed(a)))) ATOMIC("add.f64", double, old + a)
};

// ---- multimem

typedef Word (*Fold)(const Word* values, size_t count);

struct Reduction {
    const char* name;
    Fold fold;
};

static inline float widened_bfloat(uint16_t bits) { return bits_float((uint32_t)bits << 16); }

static inline uint16_t narrowed_bfloat(float wide) {
    if (wide != wide) return 0x7fff;
    const uint32_t bits = float_bits(wide);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

template <class T, class Join>
static Word folded(const Word* values, size_t count, Join join) {
    T all = get<T>(values, 0);
    for (size_t k = 1; k < count; ++k) all = join(all, get<T>(values, (int)k));
    Word result = 0;
    set<T>(&result, 0, all);
    return sizeof(T) == 4 ? (uint32_t)result : result;
}

template <float (*WIDE)(uint16_t), uint16_t (*NARROW)(float), bool KEEPS, class Join>
static Word folded_pairs(const Word* values, size_t count, Join join) {
    Word result = 0;
    for (int shift = 0; shift < 32; shift += 16) {
        float all = WIDE((uint16_t)(values[0] >> shift));
        for (size_t k = 1; k < count; ++k) {
            all = join(all, WIDE((uint16_t)(values[k] >> shift)));
            if (!KEEPS) all = WIDE(NARROW(all));
        }
        result |= (Word)NARROW(all) << shift;
    }
    return result;
}

#define FOLD(NAME, T, VALUE)                                            \
    {NAME, [](const Word* values, size_t count) -> Word {               \
         return folded<T>(values, count, [](T a, T b) { return (T)(VALUE); }); \
     }},
#define FOLD_PAIRS(NAME, WIDE, NARROW, KEEPS, VALUE)                     \
    {NAME, [](const Word* values, size_t count) -> Word {               \
         return folded_pairs<WIDE, NARROW, KEEPS>(values, count, [](float a, float b) { return VALUE; }); \
     }},
#define FOLD_ENDS(N, T) FOLD("min." N, T, b < a ? b : a) FOLD("max." N, T, b > a ? b : a)
#define FOLD_HALVES(N, WIDE, NARROW)                                                                                   \
    FOLD_PAIRS("add." N, WIDE, NARROW, false, a + b) FOLD_PAIRS("add.acc::f32." N, WIDE, NARROW, true, a + b)          \
    FOLD_PAIRS("min." N, WIDE, NARROW, true, least<float>(a, b)) FOLD_PAIRS("max." N, WIDE, NARROW, true, greatest<float>(a, b))

// As many as ptxas takes.
static const Reduction REDUCTIONS[] = {
    FOLD("add.f32", float, canonical(a + b)) FOLD("add.f64", double, a + b)
    FOLD("add.u32", uint32_t, a + b) FOLD("add.s32", int32_t, (uint32_t)a + (uint32_t)b) FOLD("add.u64", Word, a + b)
    FOLD_ENDS("u32", uint32_t) FOLD_ENDS("s32", int32_t) FOLD_ENDS("u64", Word) FOLD_ENDS("s64", int64_t)
    FOLD_HALVES("f16x2", widened, narrowed) FOLD_HALVES("bf16x2", widened_bfloat, narrowed_bfloat)
};
