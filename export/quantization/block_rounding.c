/* Rounds blocks of weights to integer codes, bit for bit as block_rounding.py does in numpy, many times faster.

   LANES blocks are handled at once, one per lane of a vector register, so that sums are made in the order of the
   elements whatever the processor. Nothing here may be contracted to fused multiplications (-ffp-contract=off). */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 16     /* blocks at once */
#define LONGEST 256  /* elements of a block */
#define COARSE 6     /* ranges that are tried first */
#define HALF 0x1.fffffep-2f /* the largest float below one half: added and truncated, ties go away from zero */
#define TINY 1e-30f  /* a smaller range counts as zero */

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EACH_CPU __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define FOR_EACH_CPU
#endif
#define INLINE static inline __attribute__((always_inline))
#define EACH for (int l = 0; l < LANES; l++)

typedef struct {
    const float *weights, *importance; /* blocks x size; columns, repeated for every row, or NULL */
    Py_ssize_t blocks, per_row;
    int size, bits, symmetric, search;
} Task;

typedef struct {
    float weight[LONGEST][LANES], factor[LONGEST][LANES]; /* transposed: element, block */
    float low[LANES], range[LANES];                       /* of a symmetric block the range is its extreme value */
    float gain[LANES], scale[LANES], zero[LANES], width[LANES];
} Tile;

INLINE float rounded(float value, float largest) {
    value = value > 0 ? value : 0;
    value = value < largest ? value : largest;
    return (float)(int)(value + HALF);
}

/* Tries scale range/width with a zero point; keeps it where less is lost. The scale is then fitted by least squares. */
INLINE void attempt(Tile *tile, int size, float largest, const float *width, const float *zero) {
    float inverse[LANES], products[LANES] = {0}, squares[LANES] = {0};
    EACH inverse[l] = width[l] / tile->range[l];
    for (int i = 0; i < size; i++)
        EACH {
            float code = rounded(tile->weight[i][l] * inverse[l] + zero[l], largest) - zero[l];
            float scaled = tile->factor[i][l] * code;
            products[l] += scaled * tile->weight[i][l];
            squares[l] += scaled * code;
        }
    EACH {
        float fitted = products[l] / squares[l], gain = fitted * products[l];
        int better = squares[l] > 0 && gain > tile->gain[l] && gain < INFINITY;
        tile->gain[l] = better ? gain : tile->gain[l];
        tile->scale[l] = better ? fitted : tile->scale[l];
        tile->zero[l] = better ? zero[l] : tile->zero[l];
        tile->width[l] = better ? width[l] : tile->width[l];
    }
}

INLINE void search(Tile *tile, const Task *task, float largest, float middle) {
    float first = task->symmetric ? -(middle - 1.6f) : largest - 1, step = task->symmetric ? -0.4f : 0.35f;
    float width[LANES], zero[LANES], center[LANES], known[LANES];
    for (int t = 0; t < COARSE; t++) {
        EACH width[l] = first + step * (float)t;
        EACH zero[l] = task->symmetric ? middle : rounded(-tile->low[l] * (width[l] / tile->range[l]), largest);
        attempt(tile, task->size, largest, width, zero);
    }
    memcpy(center, tile->width, sizeof center), memcpy(known, tile->zero, sizeof known);
    for (int turn = -1; turn <= 1; turn++)
        for (int shift = -1; shift <= 1; shift++) {
            if ((turn == 0 && shift == 0) || (task->symmetric && shift != 0)) continue;
            EACH width[l] = center[l] + step * 0.5f * (float)turn;
            EACH zero[l] = known[l] + (float)shift;
            EACH zero[l] = zero[l] < 0 ? 0 : zero[l] > largest ? largest : zero[l];
            attempt(tile, task->size, largest, width, zero);
        }
}

/* Up to LANES blocks from `first`, transposed; lanes without a block repeat the last one. */
INLINE void load(Tile *tile, const Task *task, Py_ssize_t first) {
    EACH {
        Py_ssize_t block = first + l < task->blocks ? first + l : task->blocks - 1;
        const float *source = task->weights + block * task->size;
        const float *factors = task->importance ? task->importance + block % task->per_row * task->size : NULL;
        float low = 0, high = 0;
        for (int i = 0; i < task->size; i++) {
            float value = source[i];
            tile->weight[i][l] = value;
            tile->factor[i][l] = factors ? factors[i] : 1.0f;
            low = value < low ? value : low;
            high = value > high ? value : high;
        }
        tile->low[l] = low;
        tile->range[l] = !task->symmetric ? high - low : high > -low ? high : low;
    }
}

FOR_EACH_CPU static void choose(const Task *task, float *scales, uint8_t *zeros) {
    const float largest = (float)((1 << task->bits) - 1), middle = (float)(1 << (task->bits - 1));
    Tile tile;
    for (Py_ssize_t first = 0; first < task->blocks; first += LANES) {
        load(&tile, task, first);
        EACH {
            float scale = tile.range[l] / (task->symmetric ? -middle : largest);
            tile.scale[l] = scale, tile.gain[l] = 0, tile.width[l] = task->symmetric ? -middle : largest;
            tile.zero[l] = task->symmetric ? middle : rounded(-tile.low[l] / scale, largest);
        }
        if (task->search) search(&tile, task, largest, middle);
        for (int l = 0; l < LANES && first + l < task->blocks; l++) {
            int empty = fabsf(tile.range[l]) < TINY;
            scales[first + l] = empty ? 0 : tile.scale[l];
            zeros[first + l] = (uint8_t)(empty ? middle : tile.zero[l]);
        }
    }
}

FOR_EACH_CPU static void encode(const Task *task, const float *scales, const uint8_t *zeros, uint8_t *codes) {
    const float largest = (float)((1 << task->bits) - 1);
    for (Py_ssize_t block = 0; block < task->blocks; block++) {
        const float *source = task->weights + block * task->size;
        float inverse = scales[block] != 0 ? 1.0f / scales[block] : 0, zero = (float)zeros[block];
        uint8_t whole[LONGEST];
        for (int i = 0; i < task->size; i++) whole[i] = (uint8_t)(int)rounded(source[i] * inverse + zero, largest);
        if (task->bits == 8) memcpy(codes + block * task->size, whole, (size_t)task->size);
        else
            for (int i = 0; i < task->size / 2; i++)
                codes[block * (task->size / 2) + i] = (uint8_t)(whole[2 * i] | whole[2 * i + 1] << 4);
    }
}

static int fits(const Task *task, const Py_buffer *weights, const Py_buffer *scales, const Py_buffer *zeros) {
    Py_ssize_t floats = (Py_ssize_t)sizeof(float);
    if (task->size < 2 || task->size > LONGEST || task->size % 2 || (task->bits != 4 && task->bits != 8)) return 0;
    if (weights->len != task->blocks * task->size * floats || task->blocks < 1) return 0;
    return scales->len == task->blocks * floats && zeros->len == task->blocks;
}

static PyObject *scales(PyObject *Py_UNUSED(module), PyObject *args) {
    Py_buffer weights, importance, scales, zeros;
    PyObject *done = NULL;
    Task task = {0};
    if (!PyArg_ParseTuple(args, "y*y*w*w*iipp", &weights, &importance, &scales, &zeros, &task.size, &task.bits,
                          &task.symmetric, &task.search))
        return NULL;
    task.weights = weights.buf, task.blocks = zeros.len;
    task.importance = importance.len ? importance.buf : NULL;
    task.per_row = task.size > 0 ? importance.len / (Py_ssize_t)sizeof(float) / task.size : 0;
    if (!fits(&task, &weights, &scales, &zeros) ||
        importance.len != task.per_row * task.size * (Py_ssize_t)sizeof(float))
        PyErr_SetString(PyExc_ValueError, "the sizes of the arrays do not fit each other");
    else {
        Py_BEGIN_ALLOW_THREADS
        choose(&task, scales.buf, zeros.buf);
        Py_END_ALLOW_THREADS
        done = Py_NewRef(Py_None);
    }
    PyBuffer_Release(&weights), PyBuffer_Release(&importance), PyBuffer_Release(&scales), PyBuffer_Release(&zeros);
    return done;
}

static PyObject *codes(PyObject *Py_UNUSED(module), PyObject *args) {
    Py_buffer weights, scales, zeros, codes;
    PyObject *done = NULL;
    Task task = {0};
    if (!PyArg_ParseTuple(args, "y*y*y*w*ii", &weights, &scales, &zeros, &codes, &task.size, &task.bits)) return NULL;
    task.weights = weights.buf, task.blocks = zeros.len;
    if (!fits(&task, &weights, &scales, &zeros) || codes.len != task.blocks * task.size * task.bits / 8)
        PyErr_SetString(PyExc_ValueError, "the sizes of the arrays do not fit each other");
    else {
        Py_BEGIN_ALLOW_THREADS
        encode(&task, scales.buf, zeros.buf, codes.buf);
        Py_END_ALLOW_THREADS
        done = Py_NewRef(Py_None);
    }
    PyBuffer_Release(&weights), PyBuffer_Release(&scales), PyBuffer_Release(&zeros), PyBuffer_Release(&codes);
    return done;
}

static PyMethodDef methods[] = {
    {"scales", scales, METH_VARARGS, NULL}, {"codes", codes, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_block_rounding", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__block_rounding(void) { return PyModule_Create(&definition); }
