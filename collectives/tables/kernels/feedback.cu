// Error feedback: a gradient of narrower elements, and momentum, in the pass that reads the residual. emit.cu precedes,
// entries.cu follows.
//
// A NaN is not stored, so it spoils neither the residual nor the velocity; the passes still see and report it. Then
// `take_back` undoes the rest.

__device__ inline float plain(float value) { return value; }
__device__ inline double plain(double value) { return value; }
__device__ inline float plain(Half value) { return widened(value); }
__device__ inline float plain(Bfloat16 value) { return widened(value); }

__device__ inline float ratio(float a, float b) { return __fdiv_rn(a, b); }
__device__ inline double ratio(double a, double b) { return __ddiv_rn(a, b); }

template <class Element>
__device__ inline Element or_zero(Element value) {
    return value == value ? value : 0;
}

// The summand of a residual: the gradient, or a velocity that takes it in first.
template <class Element, class Given, bool MOVES>
struct Feedback {
    const Given* gradient;
    Element* velocity;
    Element momentum;

    __device__ Feedback in_global() const {
        return {in_global_memory(gradient), MOVES ? in_global_memory(velocity) : velocity, momentum};
    }

    __device__ void add(Pack<Element> (&pack)[VECTORS], Element* x, long long first, int size) const {
        constexpr int BATCH = MOVES ? 1 : 4;  // with a velocity, more would not fit into the registers
#pragma unroll
        for (int batch = 0; batch < VECTORS; batch += BATCH) {
            Pack<Given, Element> more[BATCH];
            Pack<Element> speed[BATCH];
            read(more, gradient + first, batch, size);
            if (MOVES) read(speed, velocity + first, batch, size);
#pragma unroll
            for (int u = 0; u < BATCH; ++u) {
                const int place = place_of<Element>(batch + u);
                Pack<Element>& sum = pack[batch + u];
                Pack<Element> kept;
#pragma unroll
                for (int l = 0; l < Pack<Element>::LANES; ++l) {
                    const Element given = plain(more[u].lane[l]);
                    const Element step = MOVES ? plus(times(momentum, speed[u].lane[l]), given) : given;
                    const Element total = plus(sum.lane[l], step);
                    kept.lane[l] = total == total ? total : sum.lane[l];
                    if (MOVES && total == total) speed[u].lane[l] = step;
                    sum.lane[l] = total;
                }
                store<Element>(x + first, kept, place, size);
                if (MOVES) store<Element>(velocity + first, speed[u], place, size);
            }
        }
    }
};

// Restores x and the velocity to their values before a gradient with a NaN, but for rounding; infinities become zero.
// `broken` becomes the first place of a NaN in the gradient.
template <class Element, class Given, bool MOVES>
__device__ inline void take_back(Element* x, const Given* gradient, Element* velocity, const Element* momentum,
                                 long long count, Word* broken) {
    for (long long i = (long long)blockIdx.x * THREADS + threadIdx.x; i < count; i += (long long)gridDim.x * THREADS) {
        const Element given = plain(gradient[i]);
        if (given != given) {
            atomicMin(broken, (Word)i);
            continue;
        }
        Element step = given;
        if (MOVES) {
            step = velocity[i];
            // an infinity that was added has made the velocity its own
            if (Format<Element>::key(given) == Format<Element>::INFINITE && step != given) continue;
            velocity[i] = or_zero(ratio(plus(step, -given), *momentum));
        }
        x[i] = or_zero(plus(x[i], -step));
    }
}

// ---- kernels

#define FEEDBACK(ELEMENT, GIVEN, MOVES) \
    (Feedback<ELEMENT, GIVEN, MOVES>{gradient, velocity, MOVES ? *momentum : (ELEMENT)0})

#define FEEDBACK_HISTOGRAM(NAME, ELEMENT, GIVEN, MOVES)                                                          \
    extern "C" __global__ void __launch_bounds__(THREADS, 4)                                                     \
        NAME(ELEMENT* x, const GIVEN* gradient, ELEMENT* velocity, const ELEMENT* momentum, long long most,      \
             const Word* length, int shift, int bits, long long k, Word* counts, State* state) {                 \
        histogram(x, FEEDBACK(ELEMENT, GIVEN, MOVES), most, length, shift, bits, (Word)k, counts, state);        \
    }

#define FEEDBACK_GATHER(NAME, ELEMENT, GIVEN, MOVES)                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS, 4)                                                     \
        NAME(ELEMENT* x, const GIVEN* gradient, ELEMENT* velocity, const ELEMENT* momentum, long long count,     \
             const Word* bound, ELEMENT* values, unsigned short* places, long long room, Word* starts,           \
             unsigned* kept, State* state) {                                                                     \
        gather(x, FEEDBACK(ELEMENT, GIVEN, MOVES), count, bound, values, places, room, starts, kept, state);     \
    }

#define TAKE_BACK(NAME, ELEMENT, GIVEN, MOVES)                                                                   \
    extern "C" __global__ void __launch_bounds__(THREADS, 4)                                                     \
        NAME(ELEMENT* x, const GIVEN* gradient, ELEMENT* velocity, const ELEMENT* momentum, long long count,     \
             Word* broken) {                                                                                     \
        take_back<ELEMENT, GIVEN, MOVES>(x, gradient, velocity, momentum, count, broken);                        \
    }
