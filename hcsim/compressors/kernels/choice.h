/* A random choice of some elements out of many, as bits that are set or as a list: drawing it, and taking what it says.

   The choice is made by draws until enough different numbers were drawn, so the order in which they are marked does not
   matter. Marked as they come, each would wait for another place in memory that no near cache holds: so they are first
   put with others of the same piece, and a piece is cleared and marked while it is in the nearest cache.

   A few out of very many are listed instead, piece by piece and within one as they were drawn, and what they say is
   fetched ahead: to sort them, or to look at bits that are mostly not set, would take longer than all the rest. */

#define BATCH 1024
#define PIECES 512
#define PIECE_BITS 17   /* a piece has two to the power of these bits, or more where there would be too many of them */
#define MANY (1L << 23) /* bits that no longer stay in a second-level cache */

/* C. Doty-Humphrey's generator, as numpy has it: three words that are stirred, and a counter. */
static inline uint64_t sfc64(uint64_t state[4])
{
    uint64_t drawn = state[0] + state[1] + state[3]++;
    state[0] = state[1] ^ state[1] >> 11;
    state[1] = state[2] + (state[2] << 3);
    state[2] = (state[2] << 24 | state[2] >> 40) + drawn;
    return drawn;
}

/* Its upper 53 bits as a fraction of the population. They are halved: a compiler can convert several of 32 at once. */
static inline double place_of(uint64_t drawn, count population)
{
    double high = (double)(int32_t)(drawn >> 37), low = (double)(int32_t)(drawn >> 11 & ((1 << 26) - 1));
    return (high * 0x1p26 + low) * 0x1p-53 * (double)population;
}

/* Draws, then places: mixed, each waits for the other. */
static void draw(uint64_t state[4], uint64_t *restrict places, count n, count population)
{
    for (count i = 0; i < n; i++) places[i] = sfc64(state);
    for (count i = 0; i < n; i++) places[i] = (uint64_t)place_of(places[i], population);
}

/* Whether it was not marked before. */
static inline int mark(byte *restrict seen, uint64_t place)
{
    uint64_t before = load64(seen, (count)(place >> 6)), bit = (uint64_t)1 << (place & 63);
    store64(seen, (count)(place >> 6), before | bit);
    return !(before & bit);
}

/* How many of the drawn were not marked before. */
static count mark_drawn(uint64_t state[4], count n, count population, byte *restrict seen)
{
    count fresh = 0;
    uint64_t places[BATCH];
    for (count lo = 0; lo < n; lo += BATCH) {
        count some = least_of(BATCH, n - lo);
        draw(state, places, some, population);
        for (count i = 0; i < some; i++) fresh += mark(seen, places[i]);
    }
    return fresh;
}

/* Places sorted by pieces: `room` for each, of which so many are held. */
typedef struct {
    byte *places;
    count room, held[PIECES];
    byte cleared[PIECES];
} sorted;

/* Marks what is held of a piece, in bits that are cleared before they are first used. */
static count mark_piece(sorted *of, count piece, byte *restrict bits, count size_bytes)
{
    const byte *restrict places = of->places + 4 * piece * of->room;
    count fresh = 0, n = of->held[piece];
    if (!of->cleared[piece]) memset(bits, 0, (size_t)size_bytes);
    of->cleared[piece] = 1;
    of->held[piece] = 0;
    for (count i = 0; i < n; i++) fresh += mark(bits, load32(places, i));
    return fresh;
}

/* Clears all bits and marks the drawn; how many different ones these were. */
static count mark_by_pieces(uint64_t state[4], count n, count population, int piece_bits, byte *restrict seen,
                            byte *restrict room, count room_places)
{
    uint64_t drawn[BATCH], within = ((uint64_t)1 << piece_bits) - 1;
    count fresh = 0, pieces = ((population - 1) >> piece_bits) + 1, piece_bytes = (count)1 << (piece_bits - 3);
    count last_bytes = 8 * ((population - 1) / 64 + 1) - (pieces - 1) * piece_bytes, full = room_places / pieces;
    sorted by = {.places = room, .room = full};
    for (count lo = 0; lo < n; lo += BATCH) {
        count some = least_of(BATCH, n - lo);
        draw(state, drawn, some, population);
        for (count i = 0; i < some; i++) {
            count piece = (count)(drawn[i] >> piece_bits), held = by.held[piece]++;
            store32(room, piece * full + held, (uint32_t)(drawn[i] & within));
            if (held + 1 == full)
                fresh += mark_piece(&by, piece, seen + piece * piece_bytes, piece + 1 < pieces ? piece_bytes : last_bytes);
        }
    }
    for (count piece = 0; piece < pieces; piece++)
        fresh += mark_piece(&by, piece, seen + piece * piece_bytes, piece + 1 < pieces ? piece_bytes : last_bytes);
    return fresh;
}

static count mark_first(uint64_t state[4], count n, count population, byte *restrict seen, byte *restrict room,
                        count room_places)
{
    int piece_bits = PIECE_BITS;
    while ((population - 1) >> piece_bits >= PIECES) piece_bits++;
    if (population > MANY && piece_bits <= 32 && room_places >= PIECES)
        return mark_by_pieces(state, n, population, piece_bits, seen, room, room_places);
    memset(seen, 0, (size_t)(8 * ((population - 1) / 64 + 1)));
    return mark_drawn(state, n, population, seen);
}

static void choose(byte *restrict stream, count n, count population, byte *restrict seen, byte *restrict room,
                   count room_places)
{
    uint64_t state[4];
    memcpy(state, stream, sizeof state);
    n -= mark_first(state, n, population, seen, room, room_places);
    while (n > 0) n -= mark_drawn(state, n, population, seen);
    memcpy(stream, state, sizeof state);
}

static inline uint64_t lowest(uint64_t word)
{
    return (uint64_t)__builtin_ctzll(word | (uint64_t)1 << 63);
}

/* Most words have one bit or none: the first is written in any case, and counts if it is there. */
static count list(const byte *restrict seen, count words, byte *restrict out, count room)
{
    count found = 0;
    for (count word = 0; word < words && found < room; word++) {
        uint64_t rest = load64(seen, word), base = (uint64_t)word << 6;
        store64(out, found, base + lowest(rest));
        found += rest != 0;
        for (rest &= rest - (rest != 0); rest && found < room; rest &= rest - 1) store64(out, found++, base + lowest(rest));
    }
    return found;
}

typedef struct {
    byte *out;
    count room, found;
    float factor;
    uint32_t most; /* the largest magnitude that was taken, multiplied */
} taken;

/* Whether or not it counts, it is written: a branch would be guessed wrong too often. */
static inline void take_one(taken *to, float v, uint32_t counts)
{
    v *= to->factor;
    storef(to->out, to->found, v);
    to->most = larger(to->most, as_bits(v) & MAGNITUDE & (0u - counts));
    to->found += counts;
}

/* The marked of up to 64 elements, as there is room. */
static inline void take_word(const byte *restrict x, count last, uint64_t places, taken *to)
{
    if (to->found >= to->room) return;
    take_one(to, loadf(x, least_of((count)lowest(places), last)), places != 0);
    for (places &= places - (places != 0); places && to->found < to->room; places &= places - 1)
        take_one(to, loadf(x, (count)lowest(places)), 1);
}

/* A few lines of the cache at a time: checked, and looked through while they are at hand. The bits of the largest
   magnitude that was taken and multiplied, or of a NaN where not all are finite. */
static uint32_t take(const byte *restrict x, count n, const byte *restrict seen, float factor, byte *restrict out,
                     count room)
{
    wide trace[4] = {{0}};
    taken to = {.out = out, .room = room, .factor = factor};
    count whole = n - n % 64;
    for (count lo = 0; lo < whole; lo += 64) {
        for (count i = lo; i < lo + 64; i += LINES) {
            expect(x + 4 * i);
            UNROLLED for (int j = 0; j < LINES / WIDE; j++)
                trace[j % 4] = leave_trace(trace[j % 4], load_wide(x, i + WIDE * j));
        }
        take_word(x + 4 * lo, 63, load64(seen, lo / 64), &to);
    }
    if (whole < n) take_word(x + 4 * whole, n - whole - 1, load64(seen, whole / 64), &to);
    return are_finite(trace) && largest_of(x + 4 * whole, n - whole) < INFINITE ? to.most : MAGNITUDE;
}

/* ---- Few out of many. ---- */

#define FEW_BITS 16                      /* of a piece: as many elements as are cleared at a time when they are put back */
#define FEW_PIECES 1024
#define FEW_WORDS (1 << (FEW_BITS - 6))
#define TAKEN_AHEAD 48
#define BEYOND 0xFFFFFFFFu

/* As `draw`, for places below 2^26. */
static void draw_few(uint64_t state[4], uint32_t *restrict places, count n, count population)
{
    uint64_t raw[BATCH];
    for (count i = 0; i < n; i++) raw[i] = sfc64(state);
    for (count i = 0; i < n; i++) places[i] = (uint32_t)(int32_t)place_of(raw[i], population);
}

/* Keeps the first of each number; how many these are. */
static count keep_first(byte *restrict places, count n)
{
    byte seen[8 * FEW_WORDS] = {0};
    count kept = 0;
    for (count i = 0; i < n; i++) {
        uint32_t place = load32(places, i);
        store32(places, kept, place);
        kept += mark(seen, place);
    }
    return kept;
}

static int holds(const byte *restrict places, count n, uint32_t place)
{
    uint32_t found = 0;
    for (count i = 0; i < n; i++) found |= load32(places, i) == place;
    return found != 0;
}

/* So many different numbers at the beginning of `room`. 0 where a piece gets more of them than it has room for. */
static int choose_few(byte *restrict stream, count n, count population, byte *restrict room, count room_places)
{
    uint64_t state[4];
    uint32_t drawn[BATCH];
    memcpy(state, stream, sizeof state);
    count pieces = ((population - 1) >> FEW_BITS) + 1, full = room_places / pieces, held[FEW_PIECES] = {0}, missing = n;
    memset(room, 0, (size_t)(4 * room_places)); /* brings it into the cache; line by line in no order takes far longer */
    for (count lo = 0; lo < n; lo += BATCH) {
        count some = least_of(BATCH, n - lo);
        draw_few(state, drawn, some, population);
        for (count i = 0; i < some; i++) {
            count piece = (count)(drawn[i] >> FEW_BITS), at = held[piece]++;
            if (at >= full) return 0;
            store32(room, piece * full + at, drawn[i] & ((1u << FEW_BITS) - 1));
        }
    }
    for (count piece = 0; piece < pieces; piece++)
        missing -= held[piece] = keep_first(room + 4 * piece * full, held[piece]);
    while (missing > 0) {
        count some = least_of(BATCH, missing), fresh = 0;
        draw_few(state, drawn, some, population);
        for (count i = 0; i < some; i++) {
            count piece = (count)(drawn[i] >> FEW_BITS);
            uint32_t place = drawn[i] & ((1u << FEW_BITS) - 1);
            if (holds(room + 4 * piece * full, held[piece], place)) continue;
            if (held[piece] == full) return 0;
            store32(room, piece * full + held[piece]++, place);
            fresh++;
        }
        missing -= fresh;
    }
    count found = 0;
    for (count piece = 0; piece < pieces; piece++, found += held[piece - 1])
        for (count i = 0; i < held[piece]; i++)
            store32(room, found + i, (uint32_t)(piece << FEW_BITS) + load32(room, piece * full + i));
    memcpy(stream, state, sizeof state);
    return 1;
}

/* Multiplies what is at those places. The bits of the largest magnitude that this gives; more than a NaN's where a place
   is beyond the end. */
static uint32_t take_listed(const byte *restrict x, count n, const byte *restrict places, count chosen, float factor,
                            byte *restrict out)
{
    uint32_t most = 0;
    for (count i = 0; i < chosen; i++) {
        uint32_t place = load32(places, i);
        if (place >= n) return BEYOND;
        __builtin_prefetch(x + 4 * (count)load32(places, least_of(i + TAKEN_AHEAD, chosen - 1)));
        float v = loadf(x, place) * factor;
        storef(out, i, v);
        most = larger(most, as_bits(v) & MAGNITUDE);
    }
    return most;
}
