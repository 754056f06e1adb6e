// Weak memory between threads of several ranks: stores wait and land late, loads may return what was there before.
//
// A store waits, each element of a vector by itself, and lands at a random time, in any order with others. Until then it
// is seen by those threads only that it happens before (races.h), its own first of all: a load of theirs takes it from
// here. Ordered stores of one byte land in their order. A release and a fence, of the scope of all ranks, land all that
// happens before them first; narrower ones and barriers need not, as those whom they reach look here.
// A relaxed load may return one of the last values, if it saw no later one, if none of those that overwrote it happens
// before the load, and if they came after the thread's last acquire, fence or barrier. Acquires and weak loads return the
// last value: what else a weak load could see is a race. A value passes on what its own store has published, no more.
// Atomics act on memory at once, and land what waits for their bytes. A load never waits for a later store.
//
// An element lies within a word of memory, eight bytes from a multiple of eight.

struct Random {
    Word state;
    Word next() {  // splitmix64
        Word z = state += 0x9e3779b97f4a7c15ull;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
        z = (z ^ z >> 27) * 0x94d049bb133111ebull;
        return z ^ z >> 31;
    }
    uint32_t below(uint32_t end) { return (uint32_t)((next() >> 32) * end >> 32); }
};

// As many bytes of a register as an element has.
static inline Word cut(Word value, uint32_t size) { return size < 8 ? value & (((Word)1 << 8 * size) - 1) : value; }

struct Version {
    Word value, number;      // when it landed
    uint32_t thread, clock;  // of its store; clock 0: was there before
    Publication passed;
};

// The last values of a word that strong stores have written.
struct History {
    static constexpr size_t MOST = 4;
    uint32_t size = 0;
    std::vector<Version> versions;                // the last one is in memory
    std::vector<std::pair<uint32_t, Word>> seen;  // by each thread, the number

    Word& seen_by(uint32_t thread) {
        for (auto& one : seen)
            if (one.first == thread) return one.second;
        seen.push_back({thread, 0});
        return seen.back().second;
    }
};

struct Piece {
    uint8_t* host;
    Word value, order;
    uint32_t size, thread, clock;
    uint32_t place, next;  // among all that wait; of the same bucket
    bool strong;
    Publication passed;
};

// Stores of one rank that wait.
struct Waiting {
    static constexpr uint32_t NONE = ~0u, BUCKETS = 4096;
    std::vector<Piece> pieces;
    std::vector<uint32_t> all, free, buckets = std::vector<uint32_t>(BUCKETS, NONE);

    static uint32_t bucket(const uint8_t* host) { return ((Word)host >> 3) * 0x9e3779b97f4a7c15ull >> 52; }

    void add(Piece&& piece) {
        if (free.empty()) free.push_back((uint32_t)pieces.size()), pieces.emplace_back();
        const uint32_t number = free.back();
        free.pop_back();
        uint32_t& first = buckets[bucket(piece.host)];
        piece.place = (uint32_t)all.size(), piece.next = first;
        first = number;
        all.push_back(number);
        pieces[number] = std::move(piece);
    }

    Piece take(uint32_t number) {
        uint32_t* link = &buckets[bucket(pieces[number].host)];
        while (*link != number) link = &pieces[*link].next;
        *link = pieces[number].next;
        all[pieces[number].place] = all.back();
        pieces[all.back()].place = pieces[number].place;
        all.pop_back();
        free.push_back(number);
        return std::move(pieces[number]);
    }
};

struct WeakMemory {
    static constexpr size_t MOST = 1024;  // stores of a rank that wait
    Causality& causality;
    Random random;
    std::vector<Waiting> ranks;
    std::unordered_map<Word, History> histories;  // of elements, by their first byte
    std::vector<uint8_t> kept = std::vector<uint8_t>(Waiting::BUCKETS);  // which words may have one
    std::vector<Word> floors;  // of each thread: what was overwritten before is not seen
    Word now = 1;
    uint32_t rests, stales;    // a store lands once in so many turns, 0: at once; one load in so many is stale, 0: none

    WeakMemory(Causality& causality, size_t ranks, Word seed)
        : causality(causality), random{seed}, ranks(ranks), floors(causality.threads.size()) {
        const uint32_t ways[4][2] = {{0, 0}, {1, 8}, {16, 2}, {512, 4}};
        const uint32_t way = random.below(8);
        rests = ways[way % 4][0], stales = ways[way / 4 ? way % 4 : random.below(4)][1];
    }

    Waiting& own(uint32_t thread) { return ranks[causality.threads[thread].rank]; }

    bool visible(const Piece& piece, uint32_t thread) const {
        return causality.before(piece.thread, piece.clock, thread);
    }

    static bool overlap(const Piece& piece, const uint8_t* host, uint32_t size) {
        return piece.host < host + size && host < piece.host + piece.size;
    }

    // ---- landing

    void land(Piece&& piece) {
        if (!piece.strong) {
            forget(piece.host, piece.size);
        } else {
            History& history = past(piece.host, piece.size);
            history.versions.push_back({piece.value, ++now, piece.thread, piece.clock, std::move(piece.passed)});
            if (history.versions.size() > History::MOST) history.versions.erase(history.versions.begin());
        }
        std::memcpy(piece.host, &piece.value, piece.size);
    }

    // What was stored otherwise in these bytes has no history any longer.
    void forget(const uint8_t* host, uint32_t size) {
        if (!kept[Waiting::bucket(host)]) return;
        const Word word = (Word)host & ~(Word)7;
        for (Word at = word; at < word + 8; ++at) {
            const auto found = histories.find(at);
            if (found == histories.end()) continue;
            if (at < (Word)host + size && (Word)host < at + found->second.size) histories.erase(found);
        }
    }

    // The history of an element that a strong store changes.
    History& past(const uint8_t* host, uint32_t size) {
        auto found = histories.find((Word)host);
        if (found == histories.end() || found->second.size != size) {
            forget(host, size);
            kept[Waiting::bucket(host)] = true;
            found = histories.emplace((Word)host, History()).first;
            found->second.size = size;
            Word before = 0;
            std::memcpy(&before, host, size);
            found->second.versions.push_back({before, 0, 0, 0, {}});
        }
        return found->second;
    }

    // Land the stores of a rank to these bytes, those that a thread knows of or all, in the order of their making.
    void land_at(Waiting& waiting, const uint8_t* host, uint32_t size, int64_t known_to) {
        while (true) {
            uint32_t first = Waiting::NONE;
            for (uint32_t k = waiting.buckets[Waiting::bucket(host)]; k != Waiting::NONE; k = waiting.pieces[k].next) {
                const Piece& piece = waiting.pieces[k];
                if (overlap(piece, host, size) && (known_to < 0 || visible(piece, (uint32_t)known_to)) &&
                    (first == Waiting::NONE || piece.order < waiting.pieces[first].order))
                    first = k;
            }
            if (first == Waiting::NONE) return;
            land(waiting.take(first));
        }
    }

    // Land all that happens before what a thread does next.
    void flush(uint32_t thread) {
        Waiting& waiting = own(thread);
        for (size_t k = waiting.all.size(); k--;)
            if (visible(waiting.pieces[waiting.all[k]], thread)) land(waiting.take(waiting.all[k]));
    }

    void land_some(Waiting& waiting) {
        do land(waiting.take(waiting.all[random.below((uint32_t)waiting.all.size())]));
        while (!waiting.all.empty() && random.below(2));
    }

    // Time goes by.
    void drift() {
        if (!rests) return;
        for (Waiting& waiting : ranks)
            if (!waiting.all.empty() && (rests == 1 || random.below(rests) == 0)) land_some(waiting);
    }

    // A rank was stopped: of what waits all lands, some, or nothing.
    void lose(uint32_t rank) {
        const uint32_t way = random.below(3);
        Waiting& waiting = ranks[rank];
        for (size_t k = waiting.all.size(); way && k--;)
            if (way == 2 || random.below(2)) waiting.take(waiting.all[k]);
    }

    void land_all() {
        for (Waiting& waiting : ranks)
            while (!waiting.all.empty()) land_some(waiting);
    }

    // ---- what threads do

    void store(const Access& access, uint8_t* host, Word value, uint32_t size) {
        const bool releases = access.strength == RELEASE;
        if (releases && access.scope == OF_SYSTEM) flush(access.thread);
        Waiting& waiting = own(access.thread);
        land_at(waiting, host, size, access.thread);
        const uint32_t clock = causality.threads[access.thread].own;
        Piece piece = {host, value, ++now, size, access.thread, clock, 0, 0, access.strength != WEAK, {}};
        if (piece.strong) piece.passed = causality.publish(access);
        if (!rests) return land(std::move(piece));
        if (waiting.all.size() >= MOST) land_some(waiting);
        waiting.add(std::move(piece));
    }

    Word load(const Access& access, const uint8_t* host, uint32_t size) {
        Waiting& waiting = own(access.thread);
        const Piece* forwarded = nullptr;
        for (uint32_t k = waiting.buckets[Waiting::bucket(host)]; k != Waiting::NONE; k = waiting.pieces[k].next) {
            const Piece& piece = waiting.pieces[k];
            if (!overlap(piece, host, size) || !visible(piece, access.thread)) continue;
            if (!forwarded && piece.host == host && piece.size == size) {
                forwarded = &piece;
                continue;
            }
            // parts of several: they need not wait any longer
            land_at(waiting, host, size, access.thread);
            forwarded = nullptr;
            break;
        }
        Word value = 0;
        std::memcpy(&value, host, size);
        if (forwarded) return forwarded->value;
        if (access.strength == WEAK) return value;
        const auto found = histories.find((Word)host);
        if (found == histories.end()) {
            if (access.strength == ACQUIRE) floors[access.thread] = now;
            return value;
        }
        History& history = found->second;
        size_t chosen = history.versions.size() - 1;
        Word& seen = history.seen_by(access.thread);
        if (access.strength == STRONG && stales && history.size == size && random.below(stales) == 0) {
            auto later = [&](const Version& version) {  // whether the thread must see it
                return version.number <= floors[access.thread] || version.number <= seen || !version.clock ||
                       causality.before(version.thread, version.clock, access.thread);
            };
            size_t oldest = chosen;
            while (oldest && !later(history.versions[oldest])) --oldest;
            chosen -= random.below((uint32_t)(chosen - oldest + 1));
        }
        const Version& version = history.versions[chosen];
        seen = version.number;
        causality.learn(access, version.passed);
        if (access.strength == ACQUIRE) floors[access.thread] = now;
        return history.size == size ? version.value : value;
    }

    // Change some bytes at once; returns what was there.
    template <class Change>
    Word change(const Access& access, uint8_t* host, uint32_t size, Change change) {
        for (Waiting& waiting : ranks) land_at(waiting, host, size, -1);
        Word before = 0;
        std::memcpy(&before, host, size);
        if (access.strength == WEAK) {
            const Word after = change(before);
            forget(host, size);
            std::memcpy(host, &after, size);
            return before;
        }
        Publication passed = past(host, size).versions.back().passed;
        causality.learn(access, passed);
        if (access.strength == ACQUIRE || access.strength == BOTH) floors[access.thread] = now;
        const bool releases = access.strength == RELEASE || access.strength == BOTH;
        if (releases && access.scope == OF_SYSTEM) flush(access.thread);  // also of what it has just learnt
        const uint32_t clock = causality.threads[access.thread].own;
        passed.add(causality.publish(access));
        land({host, cut(change(before), size), 0, size, access.thread, clock, 0, 0, true, std::move(passed)});
        return before;
    }

    void fence(uint32_t thread, int scope) {
        if (scope == OF_SYSTEM) flush(thread);
        floors[thread] = now;
    }

    void met(const std::vector<uint32_t>& members) {
        for (uint32_t thread : members) floors[thread] = now;
    }
};
