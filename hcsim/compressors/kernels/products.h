/* Products of a matrix with thin ones, as PowerSGD needs them: r × m and r × n beside m × n, where r is a handful.

   Libraries that multiply matrices of any shape read memory at a fraction of its speed where one is so thin. Here four
   rows of the one meet four of the other in registers, and the large matrix is read or written once. The thin ones stay
   in the cache: where they are longer than that, a stretch of columns is done at a time. In which order sums are added
   depends on the shapes alone, not on addresses nor on threads.

   Where the processor can, a product and its sum are rounded once, elsewhere twice. A NaN or an infinity goes into all
   sums that it belongs to, whatever it is multiplied with. */

#if defined(__aarch64__)
typedef float32x4_t lanes;
static inline lanes add_product(lanes sum, lanes a, lanes b) { return vfmaq_f32(sum, a, b); }
#else
typedef float lanes __attribute__((vector_size(16)));
static inline lanes add_product(lanes sum, lanes a, lanes b) { return sum + a * b; }
#endif

#define STRETCH 32768 /* floats of a thin matrix that stay in a second-level cache while the large one passes through */
#define NARROW 1024   /* columns: shorter rows reach memory sooner one after the other than four at a time */
#define SPECIAL static inline __attribute__((always_inline)) /* compiled anew for the numbers it is called with */
#define UP_TO_FOUR(number, function, ...)         \
    switch (number) {                             \
    case 1: function(__VA_ARGS__, 1); break;      \
    case 2: function(__VA_ARGS__, 2); break;      \
    case 3: function(__VA_ARGS__, 3); break;      \
    default: function(__VA_ARGS__, 4);            \
    }

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
    UNROLLED for (int i = 0; i < rows; i++) UNROLLED for (int k = 0; k < ranks; k++) sums[i][k] = all(0);
    count whole = n - n % 4;
    for (count j = 0; j < whole; j += 4) {
        lanes some[4];
        UNROLLED for (int k = 0; k < ranks; k++) some[k] = load4(q, k * pitch + j);
        UNROLLED for (int i = 0; i < rows; i++) {
            lanes v = load4(m, i * pitch + j);
            UNROLLED for (int k = 0; k < ranks; k++) sums[i][k] = add_product(sums[i][k], v, some[k]);
        }
    }
    if (whole < n) {
        lanes some[4];
        UNROLLED for (int k = 0; k < ranks; k++) some[k] = load_some(q, k * pitch + whole, n - whole);
        UNROLLED for (int i = 0; i < rows; i++) {
            lanes v = load_some(m, i * pitch + whole, n - whole);
            UNROLLED for (int k = 0; k < ranks; k++) sums[i][k] = add_product(sums[i][k], v, some[k]);
        }
    }
    UNROLLED for (int i = 0; i < rows; i++) UNROLLED for (int k = 0; k < ranks; k++) {
        lanes sum = sums[i][k];
        storef(p, k * p_pitch + i, loadf(p, k * p_pitch + i) + ((sum[0] + sum[1]) + (sum[2] + sum[3])));
    }
}

SPECIAL void add_dots_of(const byte *restrict q, const byte *restrict m, count n, count pitch, byte *restrict p,
                         count p_pitch, count ranks, int rows)
{
    UP_TO_FOUR(ranks, add_dots, q, m, n, pitch, p, p_pitch, rows)
}

static void dots(const byte *restrict q, const byte *restrict m, byte *restrict p, count rank, count rows, count columns)
{
    memset(p, 0, (size_t)(4 * rank * rows));
    for (count lo = 0, stretch = stretch_of(rank); lo < columns; lo += stretch) {
        count n = least_of(stretch, columns - lo);
        for (count i = 0; i < rows; i += 4)
            for (count k = 0; k < rank; k += 4)
                UP_TO_FOUR(rows - i, add_dots_of, q + 4 * (k * columns + lo), m + 4 * (i * columns + lo), n, columns,
                           p + 4 * (k * rows + i), rows, rank - k)
    }
}

/* ---- Rows weighted and added: out[a] (+)= Σ w[a][b] x[b]. ---- */

SPECIAL void weigh(lanes (*restrict w)[4], const byte *restrict x, byte *restrict out, count n, count pitch, int onto,
                   int outs, int ins)
{
    count whole = n - n % 4;
    for (count j = 0; j < whole; j += 4) {
        lanes sums[4];
        UNROLLED for (int a = 0; a < outs; a++) sums[a] = onto ? load4(out, a * pitch + j) : all(0);
        UNROLLED for (int b = 0; b < ins; b++) {
            lanes v = load4(x, b * pitch + j);
            UNROLLED for (int a = 0; a < outs; a++) sums[a] = add_product(sums[a], v, w[a][b]);
        }
        UNROLLED for (int a = 0; a < outs; a++) store4(out, a * pitch + j, sums[a]);
    }
    if (whole < n) UNROLLED for (int a = 0; a < outs; a++) {
        lanes sum = onto ? load_some(out, a * pitch + whole, n - whole) : all(0);
        UNROLLED for (int b = 0; b < ins; b++) sum = add_product(sum, load_some(x, b * pitch + whole, n - whole), w[a][b]);
        store_some(out, a * pitch + whole, sum, n - whole);
    }
}

SPECIAL void weigh_some(const byte *restrict p, count of_out, count of_in, float sign, const byte *restrict x,
                        byte *restrict out, count n, count pitch, int onto, int outs, int ins)
{
    lanes w[4][4];
    UNROLLED for (int a = 0; a < outs; a++)
        UNROLLED for (int b = 0; b < ins; b++) w[a][b] = all(sign * loadf(p, a * of_out + b * of_in));
    if (onto) weigh(w, x, out, n, pitch, 1, outs, ins);
    else weigh(w, x, out, n, pitch, 0, outs, ins);
}

SPECIAL void weigh_into(const byte *restrict p, count of_out, count of_in, float sign, const byte *restrict x,
                        byte *restrict out, count n, count pitch, int onto, count ins, int outs)
{
    UP_TO_FOUR(ins, weigh_some, p, of_out, of_in, sign, x, out, n, pitch, onto, outs)
}

static void weigh_rows(const byte *restrict p, count of_out, count of_in, float sign, const byte *restrict x,
                       byte *restrict out, count n, count pitch, int onto, count outs, count ins)
{
    UP_TO_FOUR(outs, weigh_into, p, of_out, of_in, sign, x, out, n, pitch, onto, ins)
}

/* q[k] = Σ p[k][i] m[i]. */
static void sums(const byte *restrict p, const byte *restrict m, byte *restrict q, count rank, count rows, count columns)
{
    if (rows == 0) memset(q, 0, (size_t)(4 * rank * columns));
    for (count lo = 0, stretch = stretch_of(rank); lo < columns; lo += stretch)
        for (count i = 0; i < rows; i += 4)
            for (count k = 0; k < rank; k += 4)
                weigh_rows(p + 4 * (k * rows + i), rows, 1, 1.0f, m + 4 * (i * columns + lo), q + 4 * (k * columns + lo),
                           least_of(stretch, columns - lo), columns, i > 0, rank - k, rows - i);
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
                           out + 4 * (i * columns + lo), least_of(stretch, columns - lo), columns, sign != 0 || k > 0,
                           least_of(step, rows - i), rank - k);
}
