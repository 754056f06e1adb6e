// Just enough of CUDA for a C++ compiler to run the kernels in collectives/kernels: threads one after another, and rounding
// intrinsics that are plain IEEE operations (compile with -ffp-contract=off). No kernel here synchronises threads.

#include <cstring>

#define __device__
#define __global__
#define __launch_bounds__(...)

struct uint4 {
    unsigned x, y, z, w;
} __attribute__((aligned(16)));

struct uint2 {
    unsigned x, y;
} __attribute__((aligned(8)));

struct Dimension {
    int x;
};
static thread_local Dimension threadIdx, blockIdx, gridDim;

static inline float __fadd_rn(float a, float b) { return a + b; }
static inline double __dadd_rn(double a, double b) { return a + b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline double __dmul_rn(double a, double b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline double __ddiv_rn(double a, double b) { return a / b; }
static inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
static inline double __fma_rn(double a, double b, double c) { return __builtin_fma(a, b, c); }

static inline float __uint_as_float(unsigned bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

static inline unsigned __float_as_uint(float value) {
    unsigned bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

struct Half;
static inline float widened(Half value);
static inline Half narrowed_half(float wide);

template <class Pointer>
static inline Pointer in_global_memory(Pointer pointer) {
    return pointer;
}

template <class Kernel>
static void each_thread(int grid, int block, Kernel kernel) {
    gridDim.x = grid;
    for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < block; ++threadIdx.x) kernel();
}
