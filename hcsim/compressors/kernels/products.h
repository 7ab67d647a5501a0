/* Products of a matrix with thin ones, as PowerSGD needs them: r × m and r × n beside m × n, where r is a handful.

   Libraries that multiply matrices of any shape read memory at a fraction of its speed where one is so thin. Here four
   rows of the one meet four of the other in registers, and the large matrix is read or written once. The thin ones stay
   in the cache: where they are longer than that, a stretch of columns is done at a time. In which order sums are added
   depends on the shapes alone, not on addresses nor on threads.

   In `dots` and `sums` a product and its sum are rounded once on ARM, and twice on x86: one rank's own factors need not be
   those of another processor. What `outer` gives must be, so there they are rounded twice everywhere. A NaN or an infinity goes into all
   sums that it belongs to, whatever it is multiplied with. */

#if defined(__aarch64__)
typedef float32x4_t lanes;
static inline lanes add_product(lanes sum, lanes a, lanes b) { return vfmaq_f32(sum, a, b); }
static inline lanes add_rounded(lanes sum, lanes a, lanes b) { return vaddq_f32(sum, vmulq_f32(a, b)); }
#else
typedef float lanes __attribute__((vector_size(16)));
static inline lanes add_product(lanes sum, lanes a, lanes b) { return sum + a * b; }
static inline lanes add_rounded(lanes sum, lanes a, lanes b) { return sum + a * b; }
#endif

#define STRETCH 32768 /* floats of a thin matrix that stay in a second-level cache while the large one passes through */
#define NARROW 1024   /* columns: shorter rows reach memory sooner one after the other than four at a time */
#define SPECIAL static inline __attribute__((always_inline)) /* compiled anew for the numbers it is called with */

/* Four times, whatever the number: so the loop is gone before a compiler knows how many it will be. */
#define EACH(index, number) UNROLLED for (int index = 0; index < 4; index++) if (index < (number))

/* A function for each pair of numbers up to four, and a table of them. Cases of a switch would not do: a compiler may join
   them before it sees that each is simple. */
#define PAIRS_WITH(make, one) make(one, 1) make(one, 2) make(one, 3) make(one, 4)
#define FOR_PAIRS(make) PAIRS_WITH(make, 1) PAIRS_WITH(make, 2) PAIRS_WITH(make, 3) PAIRS_WITH(make, 4)
#define ROW_OF(name, one) {name##_##one##_1, name##_##one##_2, name##_##one##_3, name##_##one##_4}
#define TABLE_OF(name) {ROW_OF(name, 1), ROW_OF(name, 2), ROW_OF(name, 3), ROW_OF(name, 4)}
static inline int up_to_four(count number) { return (int)least_of(number, 4) - 1; }

static inline lanes all(float v) { return (lanes){v, v, v, v}; }
static inline lanes load4(const byte *at, count i) { lanes v; memcpy(&v, at + 4 * i, 16); return v; }
static inline void store4(byte *at, count i, lanes v) { memcpy(at + 4 * i, &v, 16); }

/* The end of a row, less than four; the other lanes are zero. */
static inline lanes load_some(const byte *at, count i, count n)
{
    return (lanes){loadf(at, i), n > 1 ? loadf(at, i + 1) : 0, n > 2 ? loadf(at, i + 2) : 0, 0};
}

static inline void store_some(byte *at, count i, lanes v, count n)
{
    storef(at, i, v[0]);
    if (n > 1) storef(at, i + 1, v[1]);
    if (n > 2) storef(at, i + 2, v[2]);
}

static count stretch_of(count rank)
{
    count columns = STRETCH / rank;
    return columns < 128 ? 128 : columns - columns % 4;
}

/* ---- Each row of m with each of q: p[k][i] += q[k] · m[i]. ---- */

SPECIAL void add_dots(const byte *restrict q, const byte *restrict m, count n, count pitch, byte *restrict p, count p_pitch,
                      int rows, int ranks)
{
    lanes sums[4][4];
    EACH(i, rows) EACH(k, ranks) sums[i][k] = all(0);
    count whole = n - n % 4;
    for (count j = 0; j < whole; j += 4) {
        lanes some[4];
        EACH(k, ranks) some[k] = load4(q, k * pitch + j);
        EACH(i, rows) {
            lanes v = load4(m, i * pitch + j);
            EACH(k, ranks) sums[i][k] = add_product(sums[i][k], v, some[k]);
        }
    }
    if (whole < n) {
        lanes some[4];
        EACH(k, ranks) some[k] = load_some(q, k * pitch + whole, n - whole);
        EACH(i, rows) {
            lanes v = load_some(m, i * pitch + whole, n - whole);
            EACH(k, ranks) sums[i][k] = add_product(sums[i][k], v, some[k]);
        }
    }
    EACH(i, rows) EACH(k, ranks) {
        lanes sum = sums[i][k];
        storef(p, k * p_pitch + i, loadf(p, k * p_pitch + i) + ((sum[0] + sum[1]) + (sum[2] + sum[3])));
    }
}

#define ADD_DOTS(rows, ranks)                                                                                     \
    static void add_dots_##rows##_##ranks(const byte *restrict q, const byte *restrict m, count n, count pitch,   \
                                          byte *restrict p, count p_pitch)                                        \
    {                                                                                                             \
        add_dots(q, m, n, pitch, p, p_pitch, rows, ranks);                                                        \
    }
FOR_PAIRS(ADD_DOTS)

static void dots(const byte *restrict q, const byte *restrict m, byte *restrict p, count rank, count rows, count columns)
{
    static void (*const add[4][4])(const byte *, const byte *, count, count, byte *, count) = TABLE_OF(add_dots);
    memset(p, 0, (size_t)(4 * rank * rows));
    for (count lo = 0, stretch = stretch_of(rank); lo < columns; lo += stretch) {
        count n = least_of(stretch, columns - lo);
        for (count i = 0; i < rows; i += 4)
            for (count k = 0; k < rank; k += 4)
                add[up_to_four(rows - i)][up_to_four(rank - k)](
                    q + 4 * (k * columns + lo), m + 4 * (i * columns + lo), n, columns, p + 4 * (k * rows + i), rows);
    }
}

/* ---- Rows weighted and added: out[a] (+)= Σ w[a][b] x[b]. ---- */

SPECIAL void weigh(lanes (*restrict w)[4], const byte *restrict x, byte *restrict out, count n, count pitch, int onto,
                   int rounded, int outs, int ins)
{
    count whole = n - n % 4;
    for (count j = 0; j < whole; j += 4) {
        lanes sums[4];
        EACH(a, outs) sums[a] = onto ? load4(out, a * pitch + j) : all(0);
        EACH(b, ins) {
            lanes v = load4(x, b * pitch + j);
            EACH(a, outs) sums[a] = rounded ? add_rounded(sums[a], v, w[a][b]) : add_product(sums[a], v, w[a][b]);
        }
        EACH(a, outs) store4(out, a * pitch + j, sums[a]);
    }
    if (whole < n) EACH(a, outs) {
        lanes sum = onto ? load_some(out, a * pitch + whole, n - whole) : all(0);
        EACH(b, ins) {
            lanes v = load_some(x, b * pitch + whole, n - whole);
            sum = rounded ? add_rounded(sum, v, w[a][b]) : add_product(sum, v, w[a][b]);
        }
        store_some(out, a * pitch + whole, sum, n - whole);
    }
}

SPECIAL void weigh_some(const byte *restrict p, count of_out, count of_in, float sign, const byte *restrict x,
                        byte *restrict out, count n, count pitch, int onto, int rounded, int outs, int ins)
{
    lanes w[4][4];
    EACH(a, outs)
        EACH(b, ins) w[a][b] = all(sign * loadf(p, a * of_out + b * of_in));
    if (onto && rounded) weigh(w, x, out, n, pitch, 1, 1, outs, ins);
    else if (onto) weigh(w, x, out, n, pitch, 1, 0, outs, ins);
    else if (rounded) weigh(w, x, out, n, pitch, 0, 1, outs, ins);
    else weigh(w, x, out, n, pitch, 0, 0, outs, ins);
}

#define WEIGH(outs, ins)                                                                                          \
    static void weigh_##outs##_##ins(const byte *restrict p, count of_out, count of_in, float sign,               \
                                     const byte *restrict x, byte *restrict out, count n, count pitch, int onto,  \
                                     int rounded)                                                                 \
    {                                                                                                             \
        weigh_some(p, of_out, of_in, sign, x, out, n, pitch, onto, rounded, outs, ins);                           \
    }
FOR_PAIRS(WEIGH)

static void weigh_rows(const byte *restrict p, count of_out, count of_in, float sign, const byte *restrict x,
                       byte *restrict out, count n, count pitch, int onto, int rounded, count outs, count ins)
{
    static void (*const some[4][4])(const byte *, count, count, float, const byte *, byte *, count, count, int, int) =
        TABLE_OF(weigh);
    some[up_to_four(outs)][up_to_four(ins)](p, of_out, of_in, sign, x, out, n, pitch, onto, rounded);
}

/* q[k] = Σ p[k][i] m[i]. */
static void sums(const byte *restrict p, const byte *restrict m, byte *restrict q, count rank, count rows, count columns)
{
    if (rows == 0) memset(q, 0, (size_t)(4 * rank * columns));
    for (count lo = 0, stretch = stretch_of(rank); lo < columns; lo += stretch)
        for (count i = 0; i < rows; i += 4)
            for (count k = 0; k < rank; k += 4)
                weigh_rows(p + 4 * (k * rows + i), rows, 1, 1.0f, m + 4 * (i * columns + lo), q + 4 * (k * columns + lo),
                           least_of(stretch, columns - lo), columns, i > 0, 0, rank - k, rows - i);
}

/* out[i] = Σ p[k][i] q[k]; or that is added to it, or subtracted. */
static void outer(const byte *restrict p, const byte *restrict q, byte *restrict out, count rank, count rows, count columns,
                  int sign)
{
    count step = sign == 0 && columns < NARROW ? 1 : 4;
    for (count lo = 0, stretch = stretch_of(rank); lo < columns; lo += stretch)
        for (count i = 0; i < rows; i += step)
            for (count k = 0; k < rank; k += 4)
                weigh_rows(p + 4 * (k * rows + i), 1, rows, sign < 0 ? -1.0f : 1.0f, q + 4 * (k * columns + lo),
                           out + 4 * (i * columns + lo), least_of(stretch, columns - lo), columns, sign != 0 || k > 0, 1,
                           least_of(step, rows - i), rank - k);
}
