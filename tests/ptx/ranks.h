// The orders of several ranks: the launches of each one after another, all ranks at once.
//
// Other than of one launch alone, here threads wait for each other most of the time. So one that has looked for news a few
// times lets others run, and nobody starves for long.

struct Ranks : Machine<true> {
    using Machine<true>::Machine;

    // The next launch of a rank, or its end.
    void next_launch(Rank& rank, bool first) {
        released = nullptr;
        if (!first) {
            ++rank.launch;
            causality->begin_again(rank.first_thread, rank.most_threads);
        }
        rank.over = rank.launch == rank.launches;
        if (rank.over) return;
        begin(rank);
        rank.blocks.resize(rank.running.launch->blocks);
        for (Block& block : rank.blocks) {
            start(block, rank, (uint32_t)(&block - rank.blocks.data()));
            for (Thread& thread : block.threads) {
                starves[number_of(block, thread)] = false;
                make_ready(block, thread);
            }
        }
    }

    void stop(Rank& rank) {
        rank.over = true;
        for (Block& block : rank.blocks)
            for (Thread& thread : block.threads) {
                if (thread.state == READY) unmake_ready(block, thread);
                thread.state = STOPPED;
            }
        weak->lose((uint32_t)(&rank - ranks.data()));
    }

    // Let others starve than before: some threads of the block that has passed a barrier just now or of any, a block, or
    // a rank; returns for how many instructions.
    Word starve(Random& random, uint32_t way) {
        for (Rank& rank : ranks)
            if (!rank.over)
                for (Block& block : rank.blocks) set_starving(block, 0, (uint32_t)block.threads.size(), false);
        Rank& rank = ranks[released ? released->rank : random.below((uint32_t)ranks.size())];
        if (!rank.over && way < 4) {
            Block& block = released ? *released : rank.blocks[random.below((uint32_t)rank.blocks.size())];
            const uint32_t size = (uint32_t)block.threads.size(), first = way == 1 ? random.below(size) : 0;
            set_starving(block, first, way == 1 ? 1 + random.below(size - first) : size, true);
        } else if (!rank.over) {
            for (Block& block : rank.blocks) set_starving(block, 0, (uint32_t)block.threads.size(), true);
        }
        return 1u << (8 + random.below(9));
    }

    // All ranks at once. Of five seeds one is fair; in the others some threads starve, or a block, or a rank, some others
    // after a while; or every thread goes far at once. Who starves goes on only where no other can.
    bool all_ranks() {
        Random random = {(Word)all.seed};
        const uint32_t way = (uint32_t)all.seed % 5;
        places.resize(thread_count), starves.resize(thread_count), keeps_lists = true;
        for (Rank& rank : ranks) next_launch(rank, true);
        Word until = 0;
        while (true) {
            if (all.stopped >= 0 && !ranks[all.stopped].over && ranks[all.stopped].steps >= (Word)all.stop_steps)
                stop(ranks[all.stopped]);
            if (!wake()) break;
            if (way % 3 && (fault.steps >= until || (way == 1 && released && random.below(4) == 0)))
                until = fault.steps + starve(random, way);
            released = nullptr;
            auto& list = ready[ready[0].empty()];
            const auto [block, thread] = list[random.below((uint32_t)list.size())];
            Rank& rank = ranks[block->rank];
            Word steps = way == 3 ? 1 << 12 : 1 + (random.next() >> 32) % (1u << random.below(8));
            if (all.stopped == (int)block->rank) steps = std::min(steps, (Word)all.stop_steps - rank.steps);
            const Word before = fault.steps;
            const bool right = run(*block, *thread, steps);
            rank.steps += fault.steps - before;
            if (!right) return false;
            if (fault.steps > (Word)all.most_steps)
                return fail(ENDLESS, block->launch().code[thread->pc], *block, *thread);
            if (thread->state == ENDED && has_ended(rank)) next_launch(rank, false);
            weak->drift();
        }
        weak->land_all();
        for (Rank& rank : ranks)
            if (!rank.over)
                for (Block& block : rank.blocks)
                    if (block.ended < block.threads.size()) return stuck(block);
        return true;
    }

    static bool has_ended(const Rank& rank) {
        for (const Block& block : rank.blocks)
            if (block.ended < block.threads.size()) return false;
        return true;
    }

    void run_all() {
        all_ranks();
        for (Rank& rank : ranks) {
            all.rank_steps[&rank - ranks.data()] = rank.steps;
            all.rank_ended[&rank - ranks.data()] = rank.launch == rank.launches;
        }
    }
};
