/* rows + left @ right, the float64 sum rounded once to bfloat16, in one pass where numpy takes twelve.

   Built where there is a compiler; without one `low_rank_sum.py` uses numpy. The sum is made in float32 with a bound of its error.
   Where both ends of what the exact sum may be round to the same number, that is the result; one element in thousands
   is summed again in float64. Sums that are infinite, NaN or too large are left to numpy. The product is made in panels
   of columns, so that what is read again and again stays in the first cache. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LANES 16  /* columns multiplied at once: one register of AVX-512, two of AVX2 */
#define GROUP 4   /* rows that share each number of `right` that is loaded */
#define PANEL 256 /* columns whose part of `right` stays in the cache */
#define TILE 32   /* rows for which it stays */
#define ITEM (Py_ssize_t)sizeof(double)

#define EPSILON 0x1p-24f    /* half a unit in the last place of float32 */
#define TINY 0x1p-120f      /* above what underflow can take from a factor */
#define LARGEST 0x1.FEp127f /* of bfloat16 */

typedef float vector __attribute__((vector_size(LANES * sizeof(float))));

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EACH_CPU __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define FOR_EACH_CPU
#endif
#define INLINE static inline __attribute__((always_inline))

typedef struct {
    uint16_t *target;
    const uint16_t *source;
    const double *left, *right;    /* rows x rank, rank x columns */
    Py_ssize_t rows, columns, rank;
    float *thin;                   /* left in float32 */
    float *panels, *tops;          /* right in float32, panel by panel; the largest number of each of their rows */
} Sum;

INLINE Py_ssize_t least(Py_ssize_t one, Py_ssize_t other) { return one < other ? one : other; }

INLINE float widened(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* bfloat16, to nearest even; of numbers only. */
INLINE uint16_t rounded(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

/* The largest magnitude of a panel's row: without their signs, floats are ordered as their bits are. */
INLINE float largest(const float *values) {
    uint32_t bits[PANEL], top = 0;
    float value;
    memcpy(bits, values, sizeof bits);
    for (int j = 0; j < PANEL; j++) top = (bits[j] & 0x7FFFFFFF) > top ? bits[j] & 0x7FFFFFFF : top;
    memcpy(&value, &top, sizeof value);
    return value;
}

/* Fills `thin`, `panels` (each rank x PANEL without gaps, zeros behind the last column) and `tops`. */
FOR_EACH_CPU static void narrow(const Sum *sum) {
    for (Py_ssize_t i = 0; i < sum->rows * sum->rank; i++) sum->thin[i] = (float)sum->left[i];
    for (Py_ssize_t first = 0, row = 0; first < sum->columns; first += PANEL)
        for (Py_ssize_t k = 0; k < sum->rank; k++, row++) {
            float *panel = sum->panels + row * PANEL;
            Py_ssize_t count = least(PANEL, sum->columns - first);
            for (Py_ssize_t j = 0; j < PANEL; j++)
                panel[j] = j < count ? (float)sum->right[k * sum->columns + first + j] : 0;
            sum->tops[row] = largest(panel);
        }
}

/* GROUP rows (the last one again where there are fewer) of left @ one panel of right. */
INLINE void multiply(float product[GROUP][PANEL], const float *thin[GROUP], const float *panel, Py_ssize_t rank) {
    for (int lane = 0; lane < PANEL; lane += LANES) {
        vector total[GROUP] = {0};
        for (Py_ssize_t k = 0; k < rank; k++) {
            vector right;
            memcpy(&right, panel + k * PANEL + lane, sizeof right);
            for (int i = 0; i < GROUP; i++) total[i] += thin[i][k] * right;
        }
        for (int i = 0; i < GROUP; i++) memcpy(product[i] + lane, &total[i], sizeof total[i]);
    }
}

/* How far a float32 product may be from the exact one: rounded are both factors, the product and each of `rank` sums. */
INLINE float error_of(const float *thin, const float *tops, Py_ssize_t rank) {
    float sum = 0;
    for (Py_ssize_t k = 0; k < rank; k++) sum += (fabsf(thin[k]) + TINY) * (tops[k] + TINY);
    return sum * ((float)rank + 4) * EPSILON + TINY;
}

/* target = source + product where that is beyond doubt, and says where it is not. Returns whether there is doubt. */
INLINE int round_row(uint16_t *restrict target, const uint16_t *restrict source, const float *restrict product,
                     float error, uint16_t *restrict doubt, Py_ssize_t count) {
    uint16_t any = 0;
    for (Py_ssize_t j = 0; j < count; j++) {
        float sum = widened(source[j]) + product[j];
        float reach = error + fabsf(sum) * (3 * EPSILON); /* `sum` is rounded, and so is each end */
        uint16_t low = rounded(sum - reach), high = rounded(sum + reach);
        doubt[j] = (low ^ high) | !(fabsf(sum) + reach < LARGEST);
        any |= doubt[j];
        target[j] = high;
    }
    return any;
}

/* One element in float64, by way of float32 as torch rounds. Returns whether it is not ordinary. */
static int settle(const Sum *sum, Py_ssize_t row, Py_ssize_t column) {
    Py_ssize_t at = row * sum->columns + column;
    double total = 0;
    for (Py_ssize_t k = 0; k < sum->rank; k++)
        total += sum->left[row * sum->rank + k] * sum->right[k * sum->columns + column];
    float value = (float)(total + widened(sum->source[at]));
    sum->target[at] = rounded(value);
    return !(fabsf(value) <= LARGEST);
}

FOR_EACH_CPU static int add_rows(const Sum *sum) {
    float product[GROUP][PANEL];
    uint16_t doubt[PANEL];
    int odd = 0;
    for (Py_ssize_t tile = 0; tile < sum->rows; tile += TILE)
        for (Py_ssize_t first = 0; first < sum->columns; first += PANEL)
            for (Py_ssize_t row = tile; row < least(tile + TILE, sum->rows); row += GROUP) {
                const float *thin[GROUP], *tops = sum->tops + first / PANEL * sum->rank;
                for (int i = 0; i < GROUP; i++) thin[i] = sum->thin + least(row + i, sum->rows - 1) * sum->rank;
                multiply(product, thin, sum->panels + first * sum->rank, sum->rank);
                for (int i = 0; i < GROUP && row + i < sum->rows; i++) {
                    Py_ssize_t at = (row + i) * sum->columns + first, count = least(PANEL, sum->columns - first);
                    float error = error_of(thin[i], tops, sum->rank);
                    if (!round_row(sum->target + at, sum->source + at, product[i], error, doubt, count)) continue;
                    for (Py_ssize_t j = 0; j < count; j++)
                        if (doubt[j]) odd |= settle(sum, row + i, first + j);
                }
            }
    return odd;
}

static PyObject *add(PyObject *Py_UNUSED(module), PyObject *args) {
    Py_buffer target, source, left, right;
    PyObject *done = NULL;
    Sum sum = {0};
    if (!PyArg_ParseTuple(args, "w*y*y*y*n", &target, &source, &left, &right, &sum.rank)) return NULL;
    sum.rows = sum.rank > 0 ? left.len / ITEM / sum.rank : 0;
    sum.columns = sum.rank > 0 ? right.len / ITEM / sum.rank : 0;
    sum.target = target.buf, sum.source = source.buf, sum.left = left.buf, sum.right = right.buf;
    Py_ssize_t width = (sum.columns + PANEL - 1) / PANEL * PANEL;
    float *work = NULL;
    if (sum.rows < 1 || sum.columns < 1 || left.len != sum.rows * sum.rank * ITEM ||
        right.len != sum.columns * sum.rank * ITEM || target.len != sum.rows * sum.columns * 2 || source.len != target.len)
        PyErr_SetString(PyExc_ValueError, "the sizes of the arrays do not fit each other");
    else if (!(work = malloc((sum.rows + width + width / PANEL) * sum.rank * sizeof *work)))
        PyErr_NoMemory();
    else {
        int odd;
        sum.thin = work, sum.panels = work + sum.rows * sum.rank, sum.tops = sum.panels + width * sum.rank;
        Py_BEGIN_ALLOW_THREADS
        narrow(&sum);
        odd = add_rows(&sum);
        Py_END_ALLOW_THREADS
        done = PyBool_FromLong(!odd);
    }
    free(work);
    PyBuffer_Release(&target), PyBuffer_Release(&source), PyBuffer_Release(&left), PyBuffer_Release(&right);
    return done;
}

static PyMethodDef methods[] = {{"add", add, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_low_rank_sum", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__low_rank_sum(void) { return PyModule_Create(&definition); }
