/* Numbering by first appearance, and the checks before a client is trained. */
#include <stdlib.h>
#include <string.h>

#include "plan.h"

int fairfold_number(const int64_t *keys, int64_t count, int32_t *numbers, int64_t *distinct, int64_t *found) {
    if (count < 0 || !found || (count && (!keys || !numbers || !distinct))) return FAIRFOLD_BAD_ARGUMENT;
    if (count > INT32_MAX / 2) return FAIRFOLD_UNSUPPORTED;
    int bits = 4;
    while (((int64_t)1 << bits) < 2 * count) bits++;
    const uint64_t mask = ((uint64_t)1 << bits) - 1;
    uint32_t *table = calloc((size_t)mask + 1, sizeof *table); /* a number plus 1; 0 is empty */
    if (!table) return FAIRFOLD_NO_MEMORY;
    int64_t next = 0;
    for (int64_t i = 0; i < count; i++) {
        uint64_t at = (uint64_t)keys[i] * 0x9E3779B97F4A7C15u >> (64 - bits);
        while (table[at] && distinct[table[at] - 1] != keys[i]) at = (at + 1) & mask;
        if (!table[at]) {
            distinct[next] = keys[i];
            table[at] = (uint32_t)++next;
        }
        numbers[i] = (int32_t)(table[at] - 1);
    }
    free(table);
    *found = next;
    return FAIRFOLD_OK;
}

#define MOST_COLUMNS 65536 /* of a branch, and units of a layer: scratch space stays small, products far from overflow */
#define MOST_LAYERS 64
#define MOST_COUNT ((int64_t)1 << 31)

static int within(const fairfold_places *places, int64_t count, int64_t size) {
    if (count && (!places->positions || !places->signs)) return 0;
    int bad = 0;
    for (int64_t i = 0; i < count; i++) bad |= places->positions[i] < 0 || places->positions[i] >= size;
    return !bad;
}

static int possible(const fairfold_model *m) {
    if (m->product < 0 || m->product > MOST_COLUMNS || m->user < 0 || m->user > MOST_COLUMNS) return 0;
    if (m->item < 0 || m->item > MOST_COLUMNS || m->layers < 0 || m->layers > MOST_LAYERS) return 0;
    if (m->layers && (!m->units || m->item == 0)) return 0;
    if (!m->layers && (m->user || m->item)) return 0;
    for (int64_t i = 0; i < m->layers; i++)
        if (m->units[i] < 1 || m->units[i] > MOST_COLUMNS) return 0;
    return m->product + m->layers > 0 && m->optimizer >= 0 && m->optimizer <= 2 &&
           m->loss >= FAIRFOLD_PAIRWISE && m->loss <= FAIRFOLD_SOFTMAX;
}

static int64_t dense_size(const fairfold_model *m) {
    int64_t inputs = m->user + m->item, total = 0;
    for (int64_t i = 0; i < m->layers; i++) {
        total += m->units[i] * (inputs + 1);
        inputs = m->units[i];
    }
    return total + (m->output ? m->product + inputs + 1 : 0);
}

int fairfold_train(const fairfold_model *m, int real, const fairfold_client *c) {
    if (!m || !c || (real != 4 && real != 8) || !possible(m)) return FAIRFOLD_BAD_ARGUMENT;
    if (c->size < 0 || c->size > INT32_MAX || c->rows < 0 || c->count < 0 || c->steps < 0) return FAIRFOLD_BAD_ARGUMENT;
    if (c->rows > MOST_COUNT || c->count > MOST_COUNT || c->steps > INT32_MAX - 1) return FAIRFOLD_UNSUPPORTED;
    const int rated = m->loss == FAIRFOLD_SQUARED;
    if (c->width < (rated ? 1 : 2) || c->width > MOST_COLUMNS) return FAIRFOLD_BAD_ARGUMENT;
    if (c->steps == 0) return FAIRFOLD_OK;
    if (!c->values || !c->samples || !c->ends || (rated && !c->targets)) return FAIRFOLD_BAD_ARGUMENT;
    int64_t before = 0;
    for (int64_t step = 0; step < c->steps; before = c->ends[step++])
        if (c->ends[step] <= before || c->ends[step] > c->count) return FAIRFOLD_BAD_ARGUMENT;
    for (int64_t i = 0; i < c->count * c->width; i++)
        if (c->samples[i] < 0 || c->samples[i] >= c->rows) return FAIRFOLD_BAD_ARGUMENT;
    if (!within(&c->items[0], c->rows * m->product, c->size) || !within(&c->items[1], c->rows * m->item, c->size) ||
        !within(&c->users[0], m->product, c->size) || !within(&c->users[1], m->user, c->size) ||
        !within(&c->dense, dense_size(m), c->size))
        return FAIRFOLD_BAD_ARGUMENT;
    return fairfold_active_body()->train[real == 8](m, c);
}
