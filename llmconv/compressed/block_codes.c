/* Largest magnitudes of groups of weights, and their codes, bit for bit as rounding.py makes them in numpy.

   Weights are bfloat16 (two bytes) or float32 (four). Nothing here may be contracted to fused multiplications
   (-ffp-contract=off); comparisons may be vectorized (-fno-trapping-math). */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EACH_CPU __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define FOR_EACH_CPU
#endif
#define INLINE static inline __attribute__((always_inline))
#define STRIP 256             /* weights that are widened at once */
#define INTEGER 0x1.8p23f     /* added to a small float, rounds it to an integer, which is in the low bits */
#define MAGNITUDE 0x7fffffffu /* without the sign */

enum { FLOAT8, INT8, FLOAT4 };

typedef struct {
    const uint8_t *words; /* rows x columns */
    Py_ssize_t rows, columns, width, groups;
    int bytes, kind;
} Task;

INLINE uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

INLINE float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* `count` weights from the element `first` on, as float32. */
INLINE void widen(const Task *task, Py_ssize_t first, int count, uint32_t *bits) {
    if (task->bytes == 4) {
        memcpy(bits, task->words + 4 * first, 4 * (size_t)count);
        return;
    }
    uint16_t narrow[STRIP];
    memcpy(narrow, task->words + 2 * first, 2 * (size_t)count);
    for (int i = 0; i < count; i++) bits[i] = (uint32_t)narrow[i] << 16;
}

/* Magnitudes as integers have the order of the floats, with infinities and NaN above all. */
FOR_EACH_CPU static void find_peaks(const Task *task, float *peaks) {
    for (Py_ssize_t row = 0; row < task->rows; row++)
        for (Py_ssize_t group = 0; group < task->groups; group++) {
            Py_ssize_t start = group * task->width, stop = start + task->width;
            uint32_t most = 0;
            stop = stop < task->columns ? stop : task->columns;
            for (Py_ssize_t at = start; at < stop; at += STRIP) {
                uint32_t bits[STRIP];
                int count = (int)(stop - at < STRIP ? stop - at : STRIP);
                widen(task, row * task->columns + at, count, bits);
                for (int i = 0; i < count; i++) {
                    uint32_t size = bits[i] & MAGNITUDE;
                    most = size > most ? size : most;
                }
            }
            peaks[row * task->groups + group] = float_of(most);
        }
}

INLINE float clipped(float value, float low, float high) {
    value = value < low ? low : value;
    return value > high ? high : value;
}

/* e4m3: below 2^-6 multiples of 2^-9; else the bits, rounded to three of the mantissa, with a bias of 7 for 127. */
INLINE uint32_t float8(float value) {
    uint32_t bits = bits_of(clipped(value, -448, 448)), size = bits & MAGNITUDE;
    uint32_t small = bits_of(float_of(size) * 512 + INTEGER) & 0x1f;
    uint32_t normal = ((size + (size >> 20 & 1) + 0x7ffff) >> 20) - (120u << 3);
    return (size < 0x3c800000 ? small : normal) | (bits >> 24 & 0x80);
}

INLINE uint32_t int8(float value) { return bits_of(clipped(value, -128, 127) + INTEGER) & 0xff; }

/* e2m1: below 1 multiples of 1/2; else the bits, rounded to one of the mantissa, with a bias of 1 for 127. */
INLINE uint32_t float4(float value) {
    uint32_t bits = bits_of(clipped(value, -6, 6)), size = bits & MAGNITUDE;
    uint32_t halves = bits_of(float_of(size) * 2 + INTEGER) & 3;
    uint32_t normal = ((size + (size >> 22 & 1) + 0x1fffff) >> 22) - (126u << 1);
    uint32_t code = size < 0x3f800000 ? halves : normal;
    return size ? code | (bits >> 28 & 8) : code;
}

INLINE void encode_strip(int kind, const uint32_t *bits, const float *scale, int count, uint8_t *whole) {
    if (kind == FLOAT8)
        for (int i = 0; i < count; i++) whole[i] = (uint8_t)float8(float_of(bits[i]) / scale[i]);
    else if (kind == INT8)
        for (int i = 0; i < count; i++) whole[i] = (uint8_t)int8(float_of(bits[i]) / scale[i]);
    else
        for (int i = 0; i < count; i++) whole[i] = (uint8_t)float4(float_of(bits[i]) / scale[i]);
}

/* The scales of `count` weights from the column `at` on, one for each. */
INLINE void spread(const Task *task, const float *scales, Py_ssize_t at, int count, float *scale) {
    for (int i = 0; i < count;) {
        Py_ssize_t group = (at + i) / task->width, left = (group + 1) * task->width - at;
        int stop = left < count ? (int)left : count;
        for (float known = scales[group]; i < stop; i++) scale[i] = known;
    }
}

FOR_EACH_CPU static void encode(const Task *task, const float *scales, uint8_t *codes) {
    for (Py_ssize_t row = 0; row < task->rows; row++)
        for (Py_ssize_t at = 0; at < task->columns; at += STRIP) {
            uint32_t bits[STRIP];
            float scale[STRIP];
            uint8_t whole[STRIP];
            int count = (int)(task->columns - at < STRIP ? task->columns - at : STRIP);
            Py_ssize_t first = row * task->columns + at;
            widen(task, first, count, bits);
            spread(task, scales + row * task->groups, at, count, scale);
            encode_strip(task->kind, bits, scale, count, whole);
            if (task->kind != FLOAT4) memcpy(codes + first, whole, (size_t)count);
            else
                for (int i = 0; i < count / 2; i++)
                    codes[first / 2 + i] = (uint8_t)(whole[2 * i] | whole[2 * i + 1] << 4);
        }
}

static int fits(Task *task, const Py_buffer *words, const Py_buffer *grid) {
    Py_ssize_t size = task->bytes == 2 || task->bytes == 4 ? task->bytes : 0;
    if (!size || task->columns < 1 || task->width < 1 || words->len < 1 || words->len % (task->columns * size)) return 0;
    if (task->kind < FLOAT8 || task->kind > FLOAT4) return 0;
    if (task->kind == FLOAT4 && (task->width % 2 || task->columns % 2)) return 0;
    task->words = words->buf, task->rows = words->len / (task->columns * size);
    task->groups = (task->columns + task->width - 1) / task->width;
    return grid->len == task->rows * task->groups * (Py_ssize_t)sizeof(float);
}

static PyObject *refused(void) {
    PyErr_SetString(PyExc_ValueError, "the sizes of the arrays do not fit each other");
    return NULL;
}

static PyObject *peaks(PyObject *Py_UNUSED(module), PyObject *args) {
    Py_buffer words, grid;
    PyObject *done = NULL;
    Task task = {0};
    if (!PyArg_ParseTuple(args, "y*w*inn", &words, &grid, &task.bytes, &task.columns, &task.width)) return NULL;
    if (!fits(&task, &words, &grid)) refused();
    else {
        Py_BEGIN_ALLOW_THREADS
        find_peaks(&task, grid.buf);
        Py_END_ALLOW_THREADS
        done = Py_NewRef(Py_None);
    }
    PyBuffer_Release(&words), PyBuffer_Release(&grid);
    return done;
}

static PyObject *codes(PyObject *Py_UNUSED(module), PyObject *args) {
    Py_buffer words, grid, codes;
    PyObject *done = NULL;
    Task task = {0};
    if (!PyArg_ParseTuple(args, "y*y*w*inni", &words, &grid, &codes, &task.bytes, &task.columns, &task.width, &task.kind))
        return NULL;
    if (!fits(&task, &words, &grid) || codes.len != task.rows * task.columns / (task.kind == FLOAT4 ? 2 : 1)) refused();
    else {
        Py_BEGIN_ALLOW_THREADS
        encode(&task, grid.buf, codes.buf);
        Py_END_ALLOW_THREADS
        done = Py_NewRef(Py_None);
    }
    PyBuffer_Release(&words), PyBuffer_Release(&grid), PyBuffer_Release(&codes);
    return done;
}

static PyMethodDef methods[] = {
    {"peaks", peaks, METH_VARARGS, NULL}, {"codes", codes, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_block_codes", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__block_codes(void) { return PyModule_Create(&definition); }
