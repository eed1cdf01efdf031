/* The step of many blocks and the sums of a layer's input on the CPU: the files `triton_*.py` in C.
 *
 * Built by `native.py` for weights in float, double, and bfloat16 (HALF), each with its own arithmetic (REAL); names of
 * columns and flags come from `tables.py`.
 * Rows are added up in the same order in every run. Nothing is written to parameters or state before `act`.
 */
#include <float.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <tgmath.h>

typedef REAL real;
#if HALF
typedef uint16_t stored; /* what weights, gradients and momenta are in: the upper half of a float */
#else
typedef REAL stored;
#endif

#define TILE 64   /* inputs that are summed at a time */
#define ROWS 256  /* rows after which sums join others in double */
#define SOON 4096 /* bytes ahead that are asked for */
#if defined(__AVX512F__)
#define BYTES 64 /* of a vector; of longer ones than the processor has compilers make slow code */
#elif defined(__AVX__)
#define BYTES 32
#else
#define BYTES 16
#endif
#define LANES (BYTES / (int64_t)sizeof(real)) /* weights of a row that are taken at once */

enum { SQUARES, ALONG, STRETCH, BEND, LEVELS, LENGTHS, DIRECTION, SHIFT, KAPPA, NORM2, BENT2 }; /* rows of `sums` */
enum { GAIN, BACK, BIAS };                                                                     /* rows of `motion` */
enum { MU, ALPHA, SPREAD, FRESH };                                                             /* rows of `vectors` */
enum { SCALED, U, BENT };                                                          /* three more, in `columns` alone */
enum { BETA, SHARES, USABLE, RAISED };                                                         /* rows of `layers` */

typedef struct {
    const int64_t *addresses, *shapes;
    const double *settings;
    real *vectors, *columns, *layers, *sums, *motion;
    float *last, *fired;
    int64_t blocks, width, longest, units;
    double momentum, floor, crowd, least, steady, drift;
    int64_t linear, even, given, guarded, counted, parts, threads;
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned); /* torch's own threads: GOMP_parallel */
} Job;

_Static_assert(sizeof(Job) == SIZE_OF_JOB, "Job is declared in native.py as well");
_Static_assert(BENT2 + 1 == SUMS && BENT + 1 + FRESH + 1 == PER_COLUMN, "native.py says how much room there is");

/* What rows of a group meet, one value per column: μ, α, the spread 1/α², βα, u = αμ, and α² times the fresh spread. */
typedef struct {
    const real *mu, *alpha, *spread, *scaled, *u, *bent;
    real norm2, bent2, kappa;
} Columns;

static inline real *at(const int64_t *p, int name) { return (real *)(intptr_t)p[name]; }
static inline stored *kept(const int64_t *p, int name) { return (stored *)(intptr_t)p[name]; }

static inline real inverse_root(real x) { return x > (real)TINY ? 1 / sqrt(x) : 0; }

typedef union {
    uint32_t bits;
    float value;
} Whole;

/* A number of a layer's input, which may be in bfloat16. */
static inline __attribute__((always_inline)) real number(const void *x, int64_t i, const int half) {
    if (!half) return ((const real *)x)[i];
    const Whole whole = {(uint32_t)((const uint16_t *)x)[i] << 16};
    return whole.value;
}

/* Add a row's x − c and (x − c)² to sums; faster where `inputs` is a constant. */
static inline __attribute__((always_inline)) void add_row(
    const void *x, int64_t row, const real *centre, real *first, real *second, const int64_t inputs, const int half) {
#pragma omp simd
    for (int64_t i = 0; i < inputs; i++) {
        const real away = number(x, row + i, half) - centre[i];
        first[i] += away;
        second[i] += away * away;
    }
}

/* Sums of x − c and (x − c)² over rows, for each input. `shape`: inputs, the distance between two of them, where
 * the first is, then sizes and strides of four dimensions of rows. */
static inline __attribute__((always_inline)) void add_rows(
    const void *x, const int64_t *shape, const real *centre, real *first, real *second, int64_t more, const int half) {
    const int64_t inputs = shape[0], step = shape[1], *n = shape + 3, *s = shape + 7;
    const int64_t tile = step == 1 ? TILE : 1;
    for (int64_t begin = 0; begin < inputs; begin += tile) {
        const int64_t wide = inputs - begin < tile ? inputs - begin : tile;
        const real *c = centre + begin;
        const int64_t from = shape[2] + begin * step;
        real a[TILE], b[TILE];
        double all[TILE], squares[TILE];
        int64_t seen = 0;
        for (int64_t i = 0; i < wide; i++) a[i] = b[i] = 0, all[i] = squares[i] = 0;
        for (int64_t i0 = 0; i0 < n[0]; i0++)
            for (int64_t i1 = 0; i1 < n[1]; i1++)
                for (int64_t i2 = 0; i2 < n[2]; i2++) {
                    const int64_t row = from + i0 * s[0] + i1 * s[1] + i2 * s[2];
                    for (int64_t done = 0; done < n[3];) {
                        int64_t some = n[3] - done < ROWS - seen ? n[3] - done : ROWS - seen;
                        if (step == 1 && wide == TILE) {
                            for (int64_t i3 = done; i3 < done + some; i3++) add_row(x, row + i3 * s[3], c, a, b, TILE, half);
                        } else if (step == 1) {
                            for (int64_t i3 = done; i3 < done + some; i3++) add_row(x, row + i3 * s[3], c, a, b, wide, half);
                        } else {
                            real one = 0, two = 0;
#pragma omp simd reduction(+ : one, two)
                            for (int64_t i3 = done; i3 < done + some; i3++) {
                                real away = number(x, row + i3 * s[3], half) - c[0];
                                one += away;
                                two += away * away;
                            }
                            a[0] += one;
                            b[0] += two;
                        }
                        done += some;
                        seen += some;
                        if (seen == ROWS) {
                            for (int64_t i = 0; i < wide; i++) all[i] += a[i], squares[i] += b[i], a[i] = b[i] = 0;
                            seen = 0;
                        }
                    }
                }
        for (int64_t i = 0; i < wide; i++) {
            all[i] += a[i], squares[i] += b[i];
            first[begin + i] = more ? first[begin + i] + all[i] : all[i];
            second[begin + i] = more ? second[begin + i] + squares[i] : squares[i];
        }
    }
}

void add_moments(const void *x, const int64_t *shape, const real *centre, real *first, real *second, int64_t more) {
    add_rows(x, shape, centre, first, second, more, 0);
}

void add_moments_of_halves(
    const void *x, const int64_t *shape, const real *centre, real *first, real *second, int64_t more) {
    add_rows(x, shape, centre, first, second, more, 1);
}

/* Coordinates of one block: μ, α and both spreads of its inputs, β, S, whether its batch is usable. */
static void frame(const Job *j, int64_t block) {
    const int64_t *p = j->addresses + block * ROW_OF_ADDRESSES, *s = j->shapes + block * SHAPES, flags = s[FLAGS];
    const double *g = j->settings + block * SETTINGS;
    real *of = j->layers + block;
    of[BETA * j->blocks] = 1;
    if (flags & SHARED) {
        const double *tally = (const double *)(intptr_t)p[TALLY];
        real shared = tally[2] > 0 ? tally[2] / (tally[3] > 1 ? tally[3] : 1) : *at(p, SHARING);
        if (g[DECLARED] == g[DECLARED]) shared = g[DECLARED];
        of[SHARES * j->blocks] = shared;
        if (j->linear) of[BETA * j->blocks] = 1 / sqrt(sqrt((real)g[FAN_IN] * shared));
    }
    if (!(flags & MOVING)) return;
    const int64_t count = s[ALL_INPUTS];
    const real *first = at(p, SLOTS), *second = first + count, *centre = at(p, CENTRE), *mx = at(p, MX), *vx = at(p, VX);
    const real rows = ((const double *)(intptr_t)p[TALLY])[0], some = rows > 1 ? rows : 1, tau = g[TAU];
    const real mass = *at(p, MASS), unproven = (1 - mass) * (real)(j->drift * j->drift);
    const int started = mass > 0;
    real *mu = j->vectors + s[BASE], *alpha = mu + j->width, *spread = alpha + j->width, *fresh = spread + j->width;
    real bad = 0, total = 0, fired = 0, steady = flags & TRAINED ? 0 : (real)j->steady;
#pragma omp simd reduction(+ : bad)
    for (int64_t i = 0; i < count; i++) bad += (first[i] + second[i]) * 0; /* NaN unless both are finite */
    const int usable = bad == 0 && rows > 0, known = usable || started;
    of[USABLE * j->blocks] = usable;
#pragma omp simd reduction(+ : total, fired)
    for (int64_t i = 0; i < count; i++) {
        real off = first[i] / some, own = second[i] / some - off * off;
        real mean = started ? mx[i] : centre[i] + off, var = started ? vx[i] : own > 0 ? own : 0;
        var = var > steady * mean * mean ? var : steady * mean * mean;
        real shift = mean - centre[i], q = (second[i] - 2 * shift * first[i] + rows * shift * shift) / some;
        q = usable ? (q > 0 ? q : 0) : var;
        q = q > unproven * mean * mean ? q : unproven * mean * mean;
        real over = q / tau, raised = over > var ? over : var;
        fired += over > var ? 1 : 0;
        total += raised;
        mu[i] = known ? mean : 0;
        spread[i] = known ? raised : 1;
        fresh[i] = known ? (q > var ? q : var) : 1;
    }
    of[RAISED * j->blocks] = known ? fired : 0;
    const real level = known ? (real)g[DAMPING] * total / count : 0;
#pragma omp simd
    for (int64_t i = 0; i < count; i++) {
        spread[i] += level;
        fresh[i] += level;
        alpha[i] = inverse_root(spread[i]);
    }
}

/* The coordinates of a group's columns: those of inputs, spread over the kernel's positions. Rows that are on v
 * already are not scaled. */
static Columns spread_out(const Job *j, const int64_t *s, int64_t group, real scale, int64_t on_v, real *to) {
    const int64_t columns = s[COLUMNS], inputs = s[INPUTS], inner = s[INNER], longest = j->longest;
    const int moving = (s[FLAGS] & MOVING) != 0;
    const real *mu = j->vectors + s[BASE] + (moving ? group * inputs : 0);
    const real *alpha = mu + j->width, *spread = alpha + j->width, *fresh = spread + j->width;
    real *scaled = to + SCALED * longest, *u = to + U * longest, *bent = to + BENT * longest;
    if (inputs != columns) {
        real *wide[4] = {to + 3 * longest, to + 4 * longest, to + 5 * longest, to + 6 * longest};
        for (int64_t c = 0; c < columns;)
            for (int64_t i = 0; i < inputs && c < columns; i++)
                for (int64_t k = 0; k < inner && c < columns; k++, c++)
                    wide[MU][c] = mu[i], wide[ALPHA][c] = alpha[i], wide[SPREAD][c] = spread[i], wide[FRESH][c] = fresh[i];
        mu = wide[MU], alpha = wide[ALPHA], spread = wide[SPREAD], fresh = wide[FRESH];
    }
    real norm2 = 0, bent2 = 0;
#pragma omp simd reduction(+ : norm2, bent2)
    for (int64_t c = 0; c < columns; c++) {
        scaled[c] = on_v ? 1 : scale * alpha[c];
        u[c] = alpha[c] * mu[c];
        bent[c] = alpha[c] * alpha[c] * fresh[c];
        norm2 += u[c] * u[c];
        bent2 += bent[c] * u[c] * u[c];
    }
    Columns found = {mu, alpha, spread, scaled, u, bent, 0, 0, 0};
    if (moving && !(s[FLAGS] & TRAINED)) {
        const real root = sqrt(1 + norm2);
        found.norm2 = norm2, found.bent2 = bent2, found.kappa = 1 / (root * (1 + root));
    }
    return found;
}

typedef real lanes __attribute__((vector_size(BYTES)));

/* A unit's row: its gradient, momentum and weights. */
typedef struct {
    const stored *grad;
    stored *buffer, *weight;
    real shift;
} Row;

/* Some columns to and from vectors: as many as there are lanes or, at the end of a row, fewer; faster where `count` is a
 * constant. */
#define FILL(vector, x, count)                                         \
    if ((count) == LANES)                                              \
        memcpy(&(vector), x, sizeof(vector));                          \
    else                                                               \
        for (int64_t k = 0; k < (count); k++) (vector)[k] = (x)[k]
#define EMPTY(vector, x, count)                                        \
    if ((count) == LANES)                                              \
        memcpy(x, &(vector), sizeof(vector));                          \
    else                                                               \
        for (int64_t k = 0; k < (count); k++) (x)[k] = (vector)[k]

static inline __attribute__((always_inline)) lanes load(const real *x, const int64_t count) {
    lanes found = {0};
    FILL(found, x, count);
    return found;
}

#if HALF
typedef uint16_t halves __attribute__((vector_size(BYTES / 2)));
typedef uint32_t words __attribute__((vector_size(BYTES)));

static inline real wide(const stored x) { return number(&x, 0, 1); }

static inline __attribute__((always_inline)) lanes fetch(const stored *x, const int64_t count) {
    halves found = {0};
    FILL(found, x, count);
    return (lanes)(__builtin_convertvector(found, words) << 16);
}

/* Rounded to the nearest, of two to the even one; NaN stays NaN. */
static inline __attribute__((always_inline)) void store(stored *x, const lanes value, const int64_t count) {
    const words bits = (words)value, none = (words)(value != value);
    const halves found = __builtin_convertvector(
        (((bits + 0x7fff + (bits >> 16 & 1)) >> 16) & ~none) | (0x7fc0 & none), halves);
    EMPTY(found, x, count);
}
#else
static inline real wide(const stored x) { return x; }

static inline __attribute__((always_inline)) lanes fetch(const stored *x, const int64_t count) { return load(x, count); }

static inline __attribute__((always_inline)) void store(stored *x, const lanes value, const int64_t count) {
    EMPTY(value, x, count);
}
#endif

static inline void store_one(stored *x, const real value) { store(x, (lanes){value}, 1); }

static inline __attribute__((always_inline)) real sum_of(const lanes x) {
    real found = 0;
    for (int64_t k = 0; k < LANES; k++) found += x[k];
    return found;
}

/* Ask for what comes soon: processors do not look beyond a page of memory, which is about as long as a row. */
static inline __attribute__((always_inline)) void foresee(const Row *row, int64_t c, const int held) {
    __builtin_prefetch((const void *)((uintptr_t)(row->grad + c) + SOON));
    __builtin_prefetch((const void *)((uintptr_t)(row->weight + c) + SOON));
    if (held) __builtin_prefetch((const void *)((uintptr_t)(row->buffer + c) + SOON));
}

/* The gradient of a unit's bias; of a layer without one, what projects its gradient. */
static real shift_of(
    const int64_t *p, const int64_t *s, const Columns *now, const stored *grad, int64_t row, real scale) {
    if (s[FLAGS] & TRAINED) return scale * wide(kept(p, BIAS_GRAD)[row]);
    if (now->kappa == 0) return 0;
    lanes along = {0};
    int64_t c = 0;
    for (; c + LANES <= s[COLUMNS]; c += LANES)
        along += load(now->scaled + c, LANES) * load(now->u + c, LANES) * fetch(grad + c, LANES);
    if (c < s[COLUMNS]) {
        const int64_t rest = s[COLUMNS] - c;
        along += load(now->scaled + c, rest) * load(now->u + c, rest) * fetch(grad + c, rest);
    }
    return now->kappa * sum_of(along);
}

static real scale_of(const Job *j, const int64_t *s, int64_t block) {
    return (s[FLAGS] & FLIPPED ? -1 : 1) * j->layers[BETA * j->blocks + block];
}

/* Write columns of a gradient on v; NaN where one is not finite. */
static inline __attribute__((always_inline)) lanes show_columns(
    const Columns *now, const stored *grad, stored *to, int64_t c, const int64_t count, real shift) {
    const lanes g = fetch(grad + c, count);
    store(to + c, load(now->scaled + c, count) * g - shift * load(now->u + c, count), count);
    return g * 0;
}

/* Show a rule the gradient on v of rows of one block; NaN if one is not finite. */
static real show(const Job *j, int64_t block, int64_t begin, int64_t end, real *room) {
    const int64_t *p = j->addresses + block * ROW_OF_ADDRESSES, *s = j->shapes + block * SHAPES, columns = s[COLUMNS];
    const real scale = scale_of(j, s, block);
    Columns now = {0};
    real nothing = 0;
    for (int64_t row = begin; row < end; row++) {
        if (row == begin || row % s[PER_GROUP] == 0) now = spread_out(j, s, row / s[PER_GROUP], scale, 0, room);
        const stored *grad = kept(p, GRAD) + row * columns;
        const real shift = shift_of(p, s, &now, grad, row, scale);
        stored *to = kept(p, SHOWN) + row * s[SHOWN_ROW];
        lanes bad = {0};
        int64_t c = 0;
        for (; c + LANES <= columns; c += LANES) bad += show_columns(&now, grad, to, c, LANES, shift);
        if (c < columns) bad += show_columns(&now, grad, to, c, columns - c, shift);
        if (s[FLAGS] & TRAINED) {
            store_one(kept(p, BIAS_SHOWN) + row * s[BIAS_SHOWN_ROW], shift);
            nothing += shift * 0;
        }
        nothing += sum_of(bad);
    }
    return nothing;
}

typedef struct {
    lanes squares, along, stretch, bend, means, lengths, bad;
} RowSums;

/* Add columns to a row's sums. `held`, `even` and `projected` are constants where this is called. */
static inline __attribute__((always_inline)) void add_columns(
    RowSums *to, const Columns *now, const Row *row, int64_t c, const int64_t count, real m, const int held,
    const int even, const int projected) {
    const lanes g = fetch(row->grad + c, count), w = fetch(row->weight + c, count), u = load(now->u + c, count);
    const lanes on_v = load(now->scaled + c, count) * g - row->shift * u;
    const lanes sum = held ? m * fetch(row->buffer + c, count) + on_v : on_v, d = even ? m * sum + on_v : sum;
    const lanes pull = load(now->bent + c, count) * d;
    if (even) to->squares += on_v * on_v;
    to->along += u * d;
    to->stretch += pull * d;
    if (projected) to->bend += pull * u;
    to->means += load(now->mu + c, count) * w;
    to->lengths += w * w * load(now->spread + c, count);
    to->bad += g * 0;
}

/* Sums over one row, for `measure`; NaN if a gradient of it is not finite. */
static inline __attribute__((always_inline)) real row_sums(
    const Columns *now, const Row *row, int64_t columns, real m, const int held, const int even, const int projected,
    real *to, int64_t units) {
    RowSums sums = {0};
    int64_t c = 0;
    for (; c + LANES <= columns; c += LANES) {
        foresee(row, c, held);
        add_columns(&sums, now, row, c, LANES, m, held, even, projected);
    }
    if (c < columns) add_columns(&sums, now, row, c, columns - c, m, held, even, projected);
    const real squares = sum_of(sums.squares);
    to[SQUARES * units] = squares, to[ALONG * units] = sum_of(sums.along), to[STRETCH * units] = sum_of(sums.stretch);
    to[BEND * units] = sum_of(sums.bend), to[LEVELS * units] = sum_of(sums.means);
    to[LENGTHS * units] = sum_of(sums.lengths);
    return sum_of(sums.bad) + squares * 0;
}

/* `row_sums` with constants: a loop for each of them. */
static real row_sums_of(
    const Job *j, const Columns *now, const Row *row, int64_t columns, real *to, int64_t units) {
    const real m = j->momentum;
    const int projected = now->kappa > 0;
#define OF(held, even, projected) row_sums(now, row, columns, m, held, even, projected, to, units)
    if (j->even) return m ? projected ? OF(1, 1, 1) : OF(1, 1, 0) : projected ? OF(0, 1, 1) : OF(0, 1, 0);
    return m ? projected ? OF(1, 0, 1) : OF(1, 0, 0) : projected ? OF(0, 0, 1) : OF(0, 0, 0);
#undef OF
}

/* A row of the gradient, or of the step on v that a rule has given for it. */
static inline const stored *row_of(const Job *j, const int64_t *p, const int64_t *s, int64_t row) {
    return j->given ? kept(p, GIVEN) + row * s[SHOWN_ROW] : kept(p, GRAD) + row * s[COLUMNS];
}

/* Sums over rows of one block; NaN if a gradient, or a sum of squares, is not finite. */
static real add_up(const Job *j, int64_t block, int64_t begin, int64_t end, real *room) {
    const int64_t *p = j->addresses + block * ROW_OF_ADDRESSES, *s = j->shapes + block * SHAPES;
    const int64_t columns = s[COLUMNS], units = j->units;
    const real scale = scale_of(j, s, block), m = j->momentum;
    Columns now = {0};
    real nothing = 0;
    for (int64_t row = begin; row < end; row++) {
        if (row == begin || row % s[PER_GROUP] == 0)
            now = spread_out(j, s, row / s[PER_GROUP], scale, j->given, room);
        const stored *grad = row_of(j, p, s, row);
        const real shift = j->given ? 0 : shift_of(p, s, &now, grad, row, scale);
        const Row here = {grad, m ? kept(p, BUFFER) + row * columns : 0, kept(p, WEIGHT) + row * columns, shift};
        real direction = 0, *to = j->sums + s[START] + row;
        nothing += row_sums_of(j, &now, &here, columns, to, units);
        if (j->given) {
            if (s[FLAGS] & TRAINED) direction = wide(kept(p, BIAS_GIVEN)[row * s[BIAS_SHOWN_ROW]]);
        } else if (s[FLAGS] & TRAINED) {
            const real held = m ? m * wide(kept(p, BIAS_BUFFER)[row]) + shift : shift;
            direction = j->even ? shift + m * held : held;
            to[SQUARES * units] += shift * shift;
            nothing += (j->even ? shift * shift : shift) * 0;
        }
        if (p[LEVEL]) to[LEVELS * units] += wide(kept(p, LEVEL)[row]);
        to[DIRECTION * units] = direction, to[SHIFT * units] = shift;
        to[KAPPA * units] = now.kappa, to[NORM2 * units] = now.norm2, to[BENT2 * units] = now.bent2;
    }
    return nothing;
}

/* How far each unit of a block goes: the rule's scale, then the trust radius. */
static void measure(const Job *j, int64_t block) {
    const int64_t *p = j->addresses + block * ROW_OF_ADDRESSES, *s = j->shapes + block * SHAPES;
    const int64_t count = s[UNITS], units = j->units;
    const double *g = j->settings + block * SETTINGS;
    const real rate = j->given ? -1 : g[RATE] * g[RATIO], bias_rate = j->given ? -1 : g[BIAS_RATE] * g[RATIO];
    const real radius = g[RADIUS];
    const real beta = j->layers[BETA * j->blocks + block], floor2 = j->floor * j->floor;
    real *sums = j->sums + s[START], *motion = j->motion + s[START], *relative = sums + SQUARES * units;
    real *average = at(p, SQUARE), level = 0, largest = 0, bound2 = radius * radius;
    int64_t stopped = 0;
    if (j->even) {
        const real decay = g[MEMORY], mass = decay * *at(p, SQUARE_MASS) + (1 - decay), kept = (1 - decay) / mass;
        real total = 0;
#pragma omp simd reduction(+ : total)
        for (int64_t i = 0; i < count; i++) {
            average[i] += kept * (relative[i] - average[i]); /* still the squares */
            total += average[i];
        }
        *at(p, SQUARE_MASS) = mass;
        level = (real)g[UNIT_DAMPING] * total / count + (real)g[EPS];
    }
    for (int64_t i = 0; i < count; i++) {
        const real *of = sums + i, along = of[ALONG * units];
        real scale = beta;
        if (j->even) {
            const real square = of[SQUARES * units];
            scale = (1 - (real)j->momentum) * inverse_root((average[i] > square ? average[i] : square) + level);
            if (s[FLAGS] & OUTSIDE) scale *= of[LENGTHS * units] > 1 ? sqrt(of[LENGTHS * units]) : 1;
        }
        const real step = rate * scale, bias_step = bias_rate * scale * of[DIRECTION * units];
        const real back = of[KAPPA * units] * along;
        real level_step = bias_step, stretch = of[STRETCH * units];
        if (of[KAPPA * units] > 0) {
            level_step = step * (along - back * of[NORM2 * units]);
            stretch += back * back * of[BENT2 * units] - 2 * back * of[BEND * units];
            stretch = stretch > 0 ? stretch : 0;
        }
        const real tall = of[LEVELS * units], unit2 = tall * tall + of[LENGTHS * units];
        relative[i] = (level_step * level_step + step * step * stretch) / (unit2 > floor2 ? unit2 : floor2);
        largest = relative[i] > largest ? relative[i] : largest;
        motion[GAIN * units + i] = -step;
        motion[BACK * units + i] = back;
        motion[BIAS * units + i] = step * along - bias_step;
    }
    const real least = j->crowd ? j->least : 1;
    if (j->guarded && !(largest <= (real)(1 - 1e-5) * least * least * bound2)) {
        if (j->crowd) {
            real logs = 0, moves = 0;
            for (int64_t i = 0; i < count; i++)
                if (relative[i] > 0) logs += log(relative[i]), moves += 1;
            const real crowd2 = (real)(j->crowd * j->crowd) * exp(logs / moves), under = bound2 * least * least;
            if (moves > 0) bound2 = fmin(bound2, crowd2 > under ? crowd2 : under);
        }
        for (int64_t i = 0; i < count; i++)
            if (relative[i] > bound2) {
                const real factor = sqrt(bound2 / relative[i]);
                motion[GAIN * units + i] *= factor;
                motion[BIAS * units + i] *= factor;
                stopped++;
            }
    }
    if (s[FLAGS] & GUARDED && j->counted) {
        float *last = j->last + 3 * s[GUARD], *fired = j->fired + 3 * s[GUARD];
        last[0] = s[FLAGS] & MOVING ? j->layers[RAISED * j->blocks + block] : 0;
        last[1] = stopped;
        last[2] = radius < (real)INFINITY ? sqrt(largest) : 0;
        fired[0] += last[0], fired[1] += last[1], fired[2] += 1;
    }
}

/* How a unit's row moves: w ← `left` w + `gain` α∘(D − `back` u), its direction D = `on` g + `held_by` times momentum. */
typedef struct {
    real left, gain, back, on, held_by;
} Motion;

static inline __attribute__((always_inline)) void move_columns(
    const Columns *now, const Row *row, const Motion *by, int64_t c, const int64_t count, real m, const int held) {
    const lanes u = load(now->u + c, count), alpha = load(now->alpha + c, count), w = fetch(row->weight + c, count);
    const lanes on_v = load(now->scaled + c, count) * fetch(row->grad + c, count) - row->shift * u;
    lanes d = on_v;
    if (held) {
        const lanes sum = m * fetch(row->buffer + c, count) + on_v;
        store(row->buffer + c, sum, count);
        d = by->on * on_v + by->held_by * sum;
    }
    store(row->weight + c, by->left * w + by->gain * alpha * (d - by->back * u), count);
}

static inline __attribute__((always_inline)) void move_row(
    const Columns *now, const Row *row, const Motion *by, int64_t columns, real m, const int held) {
    int64_t c = 0;
    for (; c + LANES <= columns; c += LANES) {
        foresee(row, c, held);
        move_columns(now, row, by, c, LANES, m, held);
    }
    if (c < columns) move_columns(now, row, by, c, columns - c, m, held);
}

/* Move weights, biases and momenta of rows of one block. */
static void move(const Job *j, int64_t block, int64_t begin, int64_t end, real *room) {
    const int64_t *p = j->addresses + block * ROW_OF_ADDRESSES, *s = j->shapes + block * SHAPES;
    const int64_t columns = s[COLUMNS], units = j->units;
    const double *g = j->settings + block * SETTINGS;
    const real scale = scale_of(j, s, block), m = j->momentum, left_bias = 1 - g[BIAS_RATE] * g[RATIO] * g[BIAS_DECAYED];
    Motion by = {.left = 1 - g[RATE] * g[RATIO] * g[DECAYED], .on = j->even ? 1 : 0, .held_by = j->even ? m : 1};
    Columns now = {0};
    for (int64_t row = begin; row < end; row++) {
        if (row == begin || row % s[PER_GROUP] == 0)
            now = spread_out(j, s, row / s[PER_GROUP], scale, j->given, room);
        const real shift = j->sums[SHIFT * units + s[START] + row], *motion = j->motion + s[START] + row;
        if (s[FLAGS] & TRAINED) {
            stored *level = kept(p, LEVEL) + row, *buffer = kept(p, BIAS_BUFFER) + row;
            store_one(level, wide(*level) * left_bias + motion[BIAS * units]);
            if (m) store_one(buffer, m * wide(*buffer) + shift);
        }
        const stored *grad = row_of(j, p, s, row);
        const Row here = {grad, m ? kept(p, BUFFER) + row * columns : 0, kept(p, WEIGHT) + row * columns, shift};
        by.gain = motion[GAIN * units], by.back = motion[BACK * units];
        if (m)
            move_row(&now, &here, &by, columns, m, 1);
        else
            move_row(&now, &here, &by, columns, m, 0);
    }
}

/* Count the step of one block, and let its batch join the running moments, about which the next one is summed; whether
 * it has some then. */
static int commit(const Job *j, int64_t block) {
    const int64_t *p = j->addresses + block * ROW_OF_ADDRESSES, *s = j->shapes + block * SHAPES, flags = s[FLAGS];
    if (p[STEP]) *(float *)(intptr_t)p[STEP] += 1;
    if (p[BIAS_STEP]) *(float *)(intptr_t)p[BIAS_STEP] += 1;
    if (flags & SHARED) *at(p, SHARING) = j->layers[SHARES * j->blocks + block];
    if (!(flags & MOVING)) return 1;
    const int64_t count = s[ALL_INPUTS];
    const real rows = ((const double *)(intptr_t)p[TALLY])[0], some = rows > 1 ? rows : 1;
    const real decay = j->settings[block * SETTINGS + MEMORY], old = *at(p, MASS);
    const real mass = decay * old + (1 - decay), k = (1 - decay) / mass;
    const real *first = at(p, SLOTS), *second = first + count;
    real *centre = at(p, CENTRE), *mx = at(p, MX), *vx = at(p, VX);
    if (j->layers[USABLE * j->blocks + block] != 0) {
#pragma omp simd
        for (int64_t i = 0; i < count; i++) {
            const real off = first[i] / some, own = second[i] / some - off * off, var = own > 0 ? own : 0;
            const real d = centre[i] + off - mx[i];
            mx[i] += k * d;
            vx[i] = (1 - k) * vx[i] + k * var + k * (1 - k) * d * d;
            centre[i] = mx[i];
        }
        *at(p, MASS) = mass;
    } else {
        for (int64_t i = 0; i < count; i++) centre[i] = old > 0 ? mx[i] : (real)NAN;
    }
    return *at(p, MASS) > 0;
}

/* A way through all rows, in parts of equally many weights. What comes out does not depend on the parting. */
typedef enum { SHOW, ADD_UP, MOVE } What;
typedef struct {
    const Job *job;
    What what;
    atomic_llong next;
    real nothing[MOST_PARTS];
} Way;

static void go(Way *way, int64_t part) {
    const Job *j = way->job;
    real *room = j->columns + part * PER_COLUMN * j->longest;
    int64_t all = 0, before = 0;
    for (int64_t block = 0; block < j->blocks; block++)
        all += j->shapes[block * SHAPES + UNITS] * j->shapes[block * SHAPES + COLUMNS];
    const int64_t from = all / j->parts * part, to = part == j->parts - 1 ? all : all / j->parts * (part + 1);
    way->nothing[part] = 0;
    for (int64_t block = 0; block < j->blocks; block++) {
        const int64_t units = j->shapes[block * SHAPES + UNITS], columns = j->shapes[block * SHAPES + COLUMNS];
        int64_t begin = from <= before ? 0 : (from - before + columns - 1) / columns;
        int64_t end = to <= before ? 0 : (to - before + columns - 1) / columns;
        begin = begin < units ? begin : units, end = end < units ? end : units;
        if (way->what == MOVE)
            move(j, block, begin, end, room);
        else
            way->nothing[part] += (way->what == SHOW ? show : add_up)(j, block, begin, end, room);
        before += units * columns;
    }
}

/* Take part after part, however many threads do. */
static void take_parts(void *shared) {
    Way *way = shared;
    for (int64_t part; (part = atomic_fetch_add(&way->next, 1)) < way->job->parts;) go(way, part);
}

static real through_all(const Job *j, What what) {
    Way way = {.job = j, .what = what};
    real nothing = 0;
    atomic_init(&way.next, 0);
    if (j->parts > 1)
        j->parallel(take_parts, &way, j->threads, 0);
    else
        take_parts(&way);
    for (int64_t part = 0; part < j->parts; part++) nothing += way.nothing[part];
    return nothing;
}

/* Look at all blocks, and show them to a rule that will give their steps: whether their gradients are finite. */
int64_t look(const Job *j) {
    for (int64_t block = 0; block < j->blocks; block++) frame(j, block);
    return through_all(j, j->given ? SHOW : ADD_UP) == 0;
}

/* Make the step. */
void act(const Job *j) {
    if (j->given) through_all(j, ADD_UP);
    for (int64_t block = 0; block < j->blocks; block++) measure(j, block);
    through_all(j, MOVE);
}

/* Count the step, and let all batches join the running moments; whether all blocks have some then. */
int64_t join(const Job *j) {
    int all = 1;
    for (int64_t block = 0; block < j->blocks; block++) all &= commit(j, block);
    return all;
}
