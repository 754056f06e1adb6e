// What kernels need beyond kernel_shim.h whose threads wait for each other: the threads of a block are fibers, blocks run
// one after another. A warp runs as far ahead of the others as it may, now the first and now the last, and blocks come in
// either order, so what depends on an order differs. A block whose threads wait at different places is given up.

#include <ucontext.h>

#include <cstdlib>
#include <functional>
#include <utility>
#include <vector>

#include "kernel_shim.h"

#define __shared__ static

namespace fibers {

enum class At { READY, WARP, BLOCK, END };

struct Fiber {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(1 << 16);
    At at;
    int meetings;
};

static std::vector<Fiber> all;
static ucontext_t scheduler;
static std::function<void()> kernel;
static unsigned long long told[2][1024];  // by the threads of a warp, at even and odd meetings

static void wait(At at) {
    Fiber& own = all[threadIdx.x];
    own.at = at;
    swapcontext(&own.context, &scheduler);
}

static void run() {
    kernel();
    all[threadIdx.x].at = At::END;
}

// What all lanes of the warp tell, when all have come.
static const unsigned long long* meet(unsigned long long value) {
    unsigned long long* words = told[all[threadIdx.x].meetings++ % 2];
    words[threadIdx.x] = value;
    wait(At::WARP);
    return words + threadIdx.x / 32 * 32;
}

static bool released(int first, int count, At at) {
    for (int i = first; i < first + count; ++i)
        if (all[i].at != at) return false;
    for (int i = first; i < first + count; ++i) all[i].at = At::READY;
    return true;
}

static bool block(int threads) {
    all.resize(threads);
    for (Fiber& fiber : all) {
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.data();
        fiber.context.uc_stack.ss_size = fiber.stack.size();
        fiber.context.uc_link = &scheduler;
        fiber.at = At::READY;
        fiber.meetings = 0;
        makecontext(&fiber.context, run, 0);
    }
    const int warps = threads / 32;
    for (int pass = blockIdx.x;; ++pass) {
        for (int i = 0; i < warps; ++i) {
            const int first = 32 * (pass % 2 ? warps - 1 - i : i);
            do {
                for (int lane = 0; lane < 32; ++lane) {
                    threadIdx.x = first + (pass % 2 ? 31 - lane : lane);
                    if (all[threadIdx.x].at == At::READY) swapcontext(&scheduler, &all[threadIdx.x].context);
                }
            } while (released(first, 32, At::WARP));
        }
        if (released(0, threads, At::BLOCK)) continue;
        for (Fiber& fiber : all)
            if (fiber.at != At::END) return false;
        return true;
    }
}

template <class... Parameters, std::size_t... Places>
static bool launch(int grid, int block_size, bool backwards, void (*entry)(Parameters...), const long long* words,
                   std::index_sequence<Places...>) {
    kernel = [=] { entry((Parameters)words[Places]...); };
    gridDim.x = grid;
    for (int i = 0; i < grid; ++i) {
        blockIdx.x = backwards ? grid - 1 - i : i;
        if (!block(block_size)) return false;
    }
    return true;
}

template <class... Parameters>
static bool launch(int grid, int block_size, bool backwards, void (*entry)(Parameters...), const long long* words) {
    return launch(grid, block_size, backwards, entry, words, std::index_sequence_for<Parameters...>());
}

template <class... Parameters>
static const int* sizes(void (*)(Parameters...)) {
    static const int bytes[] = {(int)sizeof(Parameters)..., 0};
    return bytes;
}

}  // namespace fibers

static inline void __syncthreads() { fibers::wait(fibers::At::BLOCK); }
static inline void __threadfence() {}

static inline unsigned long long __shfl_up_sync(unsigned, unsigned long long value, int far) {
    const unsigned long long* words = fibers::meet(value);
    const int lane = threadIdx.x % 32;
    return words[lane >= far ? lane - far : lane];
}

static inline unsigned __ballot_sync(unsigned, bool value) {
    const unsigned long long* words = fibers::meet(value);
    unsigned bits = 0;
    for (int lane = 0; lane < 32; ++lane) bits |= (unsigned)words[lane] << lane;
    return bits;
}

template <class Number>
static Number atomicAdd(Number* place, Number value) {
    const Number before = *place;
    *place += value;
    return before;
}

template <class Number>
static Number atomicExch(Number* place, Number value) {
    const Number before = *place;
    *place = value;
    return before;
}

template <class Number>
static Number atomicMin(Number* place, Number value) {
    const Number before = *place;
    if (value < before) *place = value;
    return before;
}

static inline int __popc(unsigned value) { return __builtin_popcount(value); }
static inline int __ffs(int value) { return __builtin_ffs(value); }

static inline long long __double_as_longlong(double value) {
    long long bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}
