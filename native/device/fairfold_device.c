/* What a device computes, out of the loops of fairfold.h. */
#include "fairfold_device.h"

#include <string.h>

#define MOST_COLUMNS 65536
#define MOST_LAYERS 64
#define MOST_DENSE 256
#define MOST_SAMPLES ((int64_t)1 << 26)
#define TRY(call) do { const int status_ = (call); if (status_) return status_; } while (0)

int fairfold_device_abi(void) { return FAIRFOLD_DEVICE_ABI; }

/* -- samples ------------------------------------------------------------------------------------------------------- */

static uint64_t draw(uint64_t *state) { /* splitmix64 */
    uint64_t word = *state += 0x9E3779B97F4A7C15u;
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9u;
    word = (word ^ word >> 27) * 0x94D049BB133111EBu;
    return word ^ word >> 31;
}

static int64_t draw_below(uint64_t *state, int64_t end) {
    const uint64_t below = (uint64_t)end, whole = UINT64_MAX / below * below;
    uint64_t word;
    do word = draw(state);
    while (word >= whole);
    return (int64_t)(word % below);
}

/* The item of some rank among those that are not in the history: history[j] has history[j] - j of them below it. */
static int64_t item_outside(const int64_t *history, int64_t count, int64_t rank) {
    int64_t low = 0, high = count;
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        if (history[middle] - middle <= rank)
            low = middle + 1;
        else
            high = middle;
    }
    return rank + low;
}

int fairfold_device_sample(const int64_t *history, int64_t count, int64_t catalogue, int64_t epochs, int64_t negatives,
                           int shuffle, uint64_t seed, int64_t *items) {
    if (count < 0 || catalogue < 1 || epochs < 0 || negatives < 0 || negatives >= MOST_COLUMNS) return FAIRFOLD_BAD_ARGUMENT;
    if (count > MOST_SAMPLES || epochs > MOST_SAMPLES || epochs * count > MOST_SAMPLES) return FAIRFOLD_UNSUPPORTED;
    if (count && epochs && (!history || !items)) return FAIRFOLD_BAD_ARGUMENT;
    for (int64_t j = 0; j < count; j++)
        if (history[j] < (j ? history[j - 1] + 1 : 0) || history[j] >= catalogue) return FAIRFOLD_BAD_ROW;
    if (negatives && count >= catalogue) return FAIRFOLD_BAD_ARGUMENT;
    const int64_t width = 1 + negatives;
    uint64_t state = seed;
    for (int64_t epoch = 0; epoch < epochs; epoch++, items += count * width) {
        for (int64_t j = 0; j < count; j++) items[j * width] = history[j];
        for (int64_t j = count - 1; shuffle && j > 0; j--) {
            const int64_t other = draw_below(&state, j + 1), moved = items[j * width];
            items[j * width] = items[other * width];
            items[other * width] = moved;
        }
        for (int64_t j = 0; j < count; j++)
            for (int64_t k = 1; k < width; k++)
                items[j * width + k] = item_outside(history, count, draw_below(&state, catalogue - count));
    }
    return FAIRFOLD_OK;
}

/* -- models -------------------------------------------------------------------------------------------------------- */

static int64_t compact_size(const fairfold_tensor *t) { return t->layout.head + t->layout.tail; }

static int64_t columns_of(const fairfold_device_model *m, int side) { return side ? m->form.item : m->form.product; }

static int64_t users_of(const fairfold_device_model *m, int side) { return side ? m->form.user : m->form.product; }

/* Numbers in the dense tensors; below 0 where the model is not possible. */
static int64_t checked_dense_size(const fairfold_device_model *m) {
    if (!m) return -1;
    const fairfold_model *f = &m->form;
    if (f->product < 0 || f->product > MOST_COLUMNS || f->user < 0 || f->user > MOST_COLUMNS || f->item < 0) return -1;
    if (f->item > MOST_COLUMNS || f->layers < 0 || f->layers > MOST_LAYERS || f->product + f->layers < 1) return -1;
    if (f->layers ? !f->units || !f->item : f->user || f->item) return -1;
    int64_t inputs = f->user + f->item, wanted = 0, given = 0;
    for (int64_t i = 0; i < f->layers; i++) {
        if (f->units[i] < 1 || f->units[i] > MOST_COLUMNS) return -1;
        wanted += f->units[i] * (inputs + 1);
        inputs = f->units[i];
    }
    if (f->output) wanted += f->product + inputs + 1;
    if (m->dense_count < 0 || m->dense_count > MOST_DENSE || (m->dense_count && !m->dense)) return -1;
    for (int64_t i = 0; i < m->dense_count; i++) {
        const int64_t full = m->dense[i].layout.full_size;
        if (full < 1 || full > INT32_MAX || !m->dense[i].values) return -1;
        given += full;
    }
    for (int side = 0; side < 2; side++)
        if ((columns_of(m, side) && !m->tables[side].values) || (users_of(m, side) && !m->user[side])) return -1;
    return wanted == given && given < INT32_MAX ? given : -1;
}

/* Memory that was handed over, piece by piece; without it the bytes are only counted. */
typedef struct {
    char *memory;
    int64_t used, size;
} room;

static void *take(room *r, int64_t count, int64_t size) {
    char *start = r->memory ? r->memory + r->used : NULL;
    r->used += (count * size + 63) / 64 * 64;
    return r->used <= r->size ? start : NULL;
}

/* Slots and signs of `count` coordinates from `first` on; the full space needs no hash. */
static int slots_of(const fairfold_tensor *t, int64_t first, int64_t count, int64_t *coordinates, int64_t *slots,
                    int8_t *signs) {
    for (int64_t k = 0; k < count; k++) coordinates[k] = first + k;
    if (t->layout.tail) return fairfold_slots_and_signs(&t->layout, coordinates, count, slots, signs);
    if (t->layout.head != t->layout.full_size) return FAIRFOLD_BAD_LAYOUT;
    if (first < 0 || first + count > t->layout.full_size) return FAIRFOLD_BAD_ROW;
    memcpy(slots, coordinates, (size_t)count * sizeof *slots);
    memset(signs, 1, (size_t)count);
    return FAIRFOLD_OK;
}

/* -- training ------------------------------------------------------------------------------------------------------ */

#define MOST_TENSORS (2 + MOST_DENSE)

/* Which slots of a tensor a round touches, and where they stand among the round's values. */
typedef struct {
    const fairfold_tensor *tensor;
    int64_t *slots;
    int64_t start, count;
} touched;

typedef struct {
    int32_t *rows;      /* of every sample's items */
    int64_t *distinct;  /* items, by row */
    int64_t *line;      /* coordinates of a row */
    int64_t *slots;     /* of all rows of a tensor */
    int32_t *positions[3];
    int8_t *signs[3];   /* of the two tables, and of all dense tensors */
    int32_t *own[2];
    int8_t *own_signs[2];
} plan;

static int64_t larger(int64_t one, int64_t other) { return one > other ? one : other; }

static void lay_out(room *r, plan *p, const fairfold_device_model *m, int64_t dense, int64_t rows, int64_t entries) {
    const int64_t wide = larger(m->form.product, m->form.item);
    p->rows = take(r, entries, sizeof *p->rows);
    p->distinct = take(r, entries, sizeof *p->distinct);
    p->line = take(r, larger(wide, dense), sizeof *p->line);
    p->slots = take(r, larger(rows * wide, dense), sizeof *p->slots);
    for (int side = 0; side < 3; side++) {
        const int64_t numbers = side < 2 ? rows * columns_of(m, side) : dense;
        p->positions[side] = take(r, numbers, sizeof *p->positions[side]);
        p->signs[side] = take(r, numbers, sizeof *p->signs[side]);
    }
    for (int side = 0; side < 2; side++) {
        p->own[side] = take(r, users_of(m, side), sizeof *p->own[side]);
        p->own_signs[side] = take(r, users_of(m, side), sizeof *p->own_signs[side]);
    }
}

int64_t fairfold_device_train_bytes(const fairfold_device_model *m, int64_t count, int64_t width) {
    const int64_t dense = checked_dense_size(m);
    if (dense < 0 || count < 0 || width < 1 || width > MOST_COLUMNS || count > MOST_SAMPLES / width) return -1;
    room r = {NULL, 0, INT64_MAX};
    plan p;
    const int64_t entries = count * width, numbers = m->form.product + m->form.item;
    lay_out(&r, &p, m, dense, entries, entries);
    take(&r, entries * numbers + dense + 64 * MOST_TENSORS, sizeof(int64_t));
    take(&r, entries * numbers + dense + m->form.product + m->form.user, sizeof(float));
    return r.used + 64 * MOST_TENSORS;
}

/* Number the slots of a tensor's coordinates: `p->slots` holds them. */
static int touch(room *r, touched *t, const fairfold_tensor *tensor, const plan *p, int64_t numbers, int32_t *positions,
                 int64_t *start) {
    if (!tensor->values) return FAIRFOLD_BAD_ARGUMENT;
    t->tensor = tensor, t->start = *start;
    t->slots = (int64_t *)(r->memory + r->used);
    if (r->used + numbers * (int64_t)sizeof *t->slots > r->size) return FAIRFOLD_NO_MEMORY;
    TRY(fairfold_number(p->slots, numbers, positions, t->slots, &t->count));
    if (!take(r, t->count, sizeof *t->slots)) return FAIRFOLD_NO_MEMORY;
    for (int64_t k = 0; k < numbers; k++) positions[k] += (int32_t)*start;
    *start += t->count;
    return *start > INT32_MAX ? FAIRFOLD_UNSUPPORTED : FAIRFOLD_OK;
}

int fairfold_device_train(const fairfold_device_model *m, const fairfold_device_samples *s, void *memory, int64_t size) {
    const int64_t dense = checked_dense_size(m);
    if (dense < 0 || !s || s->count < 0 || s->width < 1 || s->width > MOST_COLUMNS || !memory) return FAIRFOLD_BAD_ARGUMENT;
    if (s->count > MOST_SAMPLES / s->width) return FAIRFOLD_UNSUPPORTED;
    if (s->count && !s->items) return FAIRFOLD_BAD_ARGUMENT;
    const int64_t entries = s->count * s->width;
    for (int64_t i = 0; i < entries; i++)
        if (s->items[i] < 0) return FAIRFOLD_BAD_ROW;
    room r = {memory, 0, size};
    plan p;
    int64_t rows = 0;
    p.rows = take(&r, entries, sizeof *p.rows), p.distinct = take(&r, entries, sizeof *p.distinct);
    if (r.used > size) return FAIRFOLD_NO_MEMORY;
    TRY(fairfold_number(s->items, entries, p.rows, p.distinct, &rows));
    r.used = 0;
    lay_out(&r, &p, m, dense, rows, entries);
    if (r.used > size) return FAIRFOLD_NO_MEMORY;

    touched all[MOST_TENSORS];
    int64_t tensors = 0, start = 0;
    for (int side = 0; side < 2; side++) {
        const int64_t columns = columns_of(m, side);
        for (int64_t row = 0; columns && row < rows; row++) {
            if (p.distinct[row] > INT64_MAX / MOST_COLUMNS - 1) return FAIRFOLD_BAD_ROW;
            TRY(slots_of(&m->tables[side], p.distinct[row] * columns, columns, p.line, p.slots + row * columns,
                         p.signs[side] + row * columns));
        }
        if (columns) TRY(touch(&r, &all[tensors++], &m->tables[side], &p, rows * columns, p.positions[side], &start));
    }
    int64_t before = 0;
    for (int64_t i = 0; i < m->dense_count; i++) {
        const int64_t numbers = m->dense[i].layout.full_size;
        TRY(slots_of(&m->dense[i], 0, numbers, p.line, p.slots, p.signs[2] + before));
        TRY(touch(&r, &all[tensors++], &m->dense[i], &p, numbers, p.positions[2] + before, &start));
        before += numbers;
    }
    for (int side = 0; side < 2; side++)
        for (int64_t k = 0; k < users_of(m, side); k++)
            p.own[side][k] = (int32_t)(start++), p.own_signs[side][k] = 1;
    float *values = take(&r, start, sizeof *values);
    if (!values) return FAIRFOLD_NO_MEMORY;

    float *next = values;
    for (int64_t i = 0; i < tensors; i++)
        for (int64_t k = 0; k < all[i].count; k++) {
            if (all[i].slots[k] >= compact_size(all[i].tensor)) return FAIRFOLD_BAD_LAYOUT;
            *next++ = all[i].tensor->values[all[i].slots[k]];
        }
    for (int side = 0; side < 2; side++)
        for (int64_t k = 0; k < users_of(m, side); k++) *next++ = m->user[side][k];
    const fairfold_client client = {
        .values = values, .size = start,
        .items = {{p.positions[0], p.signs[0]}, {p.positions[1], p.signs[1]}},
        .users = {{p.own[0], p.own_signs[0]}, {p.own[1], p.own_signs[1]}},
        .dense = {p.positions[2], p.signs[2]}, .rows = rows,
        .samples = p.rows, .count = s->count, .width = s->width,
        .targets = s->targets, .ends = s->ends, .steps = s->steps,
    };
    TRY(fairfold_train(&m->form, 4, &client));
    next = values;
    for (int64_t i = 0; i < tensors; i++)
        for (int64_t k = 0; k < all[i].count; k++) all[i].tensor->values[all[i].slots[k]] = *next++;
    for (int side = 0; side < 2; side++)
        for (int64_t k = 0; k < users_of(m, side); k++) m->user[side][k] = *next++;
    return FAIRFOLD_OK;
}

int fairfold_device_add(float *total, const float *values, const float *before, double weight, int64_t count) {
    if (count < 0 || (count && (!total || !values))) return FAIRFOLD_BAD_ARGUMENT;
    const float factor = (float)weight;
    for (int64_t k = 0; k < count; k++) total[k] += (before ? values[k] - before[k] : values[k]) * factor;
    return FAIRFOLD_OK;
}

/* -- scores -------------------------------------------------------------------------------------------------------- */

typedef struct {
    float *dense, *item[2], *hidden[2];
    int64_t *line, *slots;
    int8_t *signs;
} scorer;

static void lay_out_scorer(room *r, scorer *s, const fairfold_device_model *m, int64_t dense) {
    int64_t wide = larger(m->form.product, m->form.item), widest = m->form.user + m->form.item;
    for (int64_t i = 0; i < m->form.layers; i++) widest = larger(widest, m->form.units[i]);
    wide = larger(wide, dense);
    s->dense = take(r, dense, sizeof(float));
    s->item[0] = take(r, m->form.product, sizeof(float)), s->item[1] = take(r, m->form.item, sizeof(float));
    s->hidden[0] = take(r, widest, sizeof(float)), s->hidden[1] = take(r, widest, sizeof(float));
    s->line = take(r, wide, sizeof(int64_t)), s->slots = take(r, wide, sizeof(int64_t));
    s->signs = take(r, wide, 1);
}

int64_t fairfold_device_scores_bytes(const fairfold_device_model *m) {
    const int64_t dense = checked_dense_size(m);
    if (dense < 0) return -1;
    room r = {NULL, 0, INT64_MAX};
    scorer s;
    lay_out_scorer(&r, &s, m, dense);
    return r.used;
}

static int recover(const scorer *s, const fairfold_tensor *t, int64_t first, int64_t count, float *out) {
    TRY(slots_of(t, first, count, s->line, s->slots, s->signs));
    for (int64_t k = 0; k < count; k++) out[k] = t->values[s->slots[k]] * (float)s->signs[k];
    return FAIRFOLD_OK;
}

static float score(const fairfold_device_model *m, const scorer *s) {
    const fairfold_model *f = &m->form;
    const float *weights = s->dense, *inputs = s->hidden[0];
    int64_t count = f->user + f->item;
    for (int64_t k = 0; k < f->user; k++) s->hidden[0][k] = m->user[1][k];
    for (int64_t k = 0; k < f->item; k++) s->hidden[0][f->user + k] = s->item[1][k];
    for (int64_t layer = 0; layer < f->layers; layer++) {
        const int64_t units = f->units[layer];
        float *outputs = s->hidden[(layer + 1) % 2];
        for (int64_t unit = 0; unit < units; unit++) {
            float sum = weights[units * count + unit];
            for (int64_t k = 0; k < count; k++) sum += weights[unit * count + k] * inputs[k];
            outputs[unit] = sum > 0 ? sum : 0;
        }
        weights += units * (count + 1), count = units, inputs = outputs;
    }
    if (!f->layers) count = 0;
    float total = 0;
    for (int64_t k = 0; k < f->product; k++) {
        const float product = m->user[0][k] * s->item[0][k];
        total += f->output ? product * weights[k] : product;
    }
    for (int64_t k = 0; k < count; k++) total += f->output ? inputs[k] * weights[f->product + k] : inputs[k];
    return f->output ? total + weights[f->product + count] : total;
}

int fairfold_device_scores(const fairfold_device_model *m, int64_t first, int64_t count, float *scores, void *memory,
                           int64_t size) {
    const int64_t dense = checked_dense_size(m);
    if (dense < 0 || first < 0 || count < 0 || (count && !scores) || !memory) return FAIRFOLD_BAD_ARGUMENT;
    if (first > INT64_MAX / MOST_COLUMNS - count - 1) return FAIRFOLD_BAD_ROW;
    room r = {memory, 0, size};
    scorer s;
    lay_out_scorer(&r, &s, m, dense);
    if (r.used > size) return FAIRFOLD_NO_MEMORY;
    int64_t before = 0;
    for (int64_t i = 0; i < m->dense_count; before += m->dense[i++].layout.full_size)
        TRY(recover(&s, &m->dense[i], 0, m->dense[i].layout.full_size, s.dense + before));
    for (int64_t k = 0; k < count; k++) {
        for (int side = 0; side < 2; side++) {
            const int64_t columns = columns_of(m, side);
            if (columns) TRY(recover(&s, &m->tables[side], (first + k) * columns, columns, s.item[side]));
        }
        scores[k] = score(m, &s);
    }
    return FAIRFOLD_OK;
}
