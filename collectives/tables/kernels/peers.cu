// Kernels between GPUs that belong to no plan; forest.cu precedes.

// ---- a test of the stores and flags on which forest.cu relies
//
// It stores a mark in the arena of each rank that it reaches, releases a flag behind it, and waits for the flag and the
// mark of each. A word in host memory or the timeout stops it.

constexpr long long MARK_WORDS = 2;    // of a rank in an arena: the mark, the flag

// State of each peer, for the host.
enum Heard { NOTHING, MARK, OTHER };

// `page` is in host memory: STOP, the state of each rank, the address of each arena (0: not reached), and the flag that
// each rank releases. A rank adds the number of the peer to its flag for the mark.
extern "C" __global__ void try_peers(unsigned long long* page, long long rank, long long ranks, long long timeout) {
    unsigned long long* const heard = page + 1;
    unsigned long long* const arenas = heard + ranks;
    const unsigned long long* const flags = arenas + ranks;
    for (long long peer = threadIdx.x; peer < ranks; peer += blockDim.x) {
        if (!arenas[peer]) continue;
        unsigned long long* const there = (unsigned long long*)arenas[peer] + MARK_WORDS * rank;
        there[0] = flags[rank] + peer;
        release(there + 1, flags[rank]);
    }
    const long long begun = now();
    for (long long peer = threadIdx.x; peer < ranks; peer += blockDim.x) {
        if (!arenas[peer]) continue;
        const unsigned long long* const here = (const unsigned long long*)arenas[rank] + MARK_WORDS * peer;
        bool came = false;
        for (unsigned polls = 1; !came; ++polls) {
            came = acquired(here + 1) == flags[peer];
            if (!came && polls % POLLS == 0 && (acquired(page + STOP) || now() - begun > timeout)) break;
        }
        tell(heard + peer, !came ? NOTHING : here[0] == flags[peer] + rank ? MARK : OTHER);
    }
}

// ---- word to ranks that compare calls (`begins`) that this one does not

extern "C" __global__ void tell_call(const Control* control, unsigned long long number) {
    tell_all(*control, number, 0);
}
