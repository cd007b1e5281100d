/* Spoiled tasks for the C library: refused, and nothing changed, or within their buffers (built with sanitizers).
 *
 *     device_fuzz 20000 1    # as many, from seed 1; prints how often each status came
 *
 * The numbers that a message brings are drawn anew: layouts, forms, samples, steps, packed rows. Buffers have exactly the
 * lengths that these say, so that a step outside of one is a fault.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../native/device/fairfold_device.h"

#define FACTORS 4
#define ITEMS 60
#define MOST 4096 /* numbers of a buffer; tasks of more are not built */

static uint64_t state;

static uint64_t draw(uint64_t end) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return end ? (state >> 33) % end : 0;
}

static int64_t odd(int64_t number) { /* another number in the place of one */
    const uint64_t value = (uint64_t)number;
    const int64_t all[] = {
        0, 1, -1, 2, (int64_t)(value + 1), (int64_t)(value - 1), (int64_t)(0 - value), (int64_t)(value * 2),
        INT32_MAX, INT64_MAX, INT64_MIN, 1 << 20,
    };
    return all[draw(sizeof all / sizeof *all)];
}

static void spoil(int64_t *numbers, int count, int times) {
    while (times--) {
        const uint64_t k = draw((uint64_t)count);
        numbers[k] = odd(numbers[k]);
    }
}

static float *vector(int64_t count) {
    float *made = malloc((size_t)(count > 0 ? count : 0) * sizeof *made + !count);
    for (int64_t k = 0; k < count; k++) made[k] = draw(500) ? (float)draw(2000) / 1000 - 1 : (float)1e38 * 1e9f;
    return made;
}

static int64_t length_of(const fairfold_tensor *t) {
    if (t->layout.head < 0 || t->layout.tail < 0 || t->layout.head > MOST || t->layout.tail > MOST) return -1;
    return t->layout.head + t->layout.tail;
}

static void train_and_score(int *counts) {
    const int64_t held = ITEMS * FACTORS / 4;
    fairfold_tensor tables[2], dense[4];
    int64_t form[] = {FACTORS, FACTORS, FACTORS, 1, 1, (int64_t)draw(3), (int64_t)draw(3)}, units[] = {FACTORS};
    const int64_t sizes[] = {FACTORS * 2 * FACTORS, FACTORS, 2 * FACTORS, 1};
    for (int k = 0; k < 2; k++) {
        const int64_t head = 8 * (int64_t)draw(2), chunk = 1 + 3 * (int64_t)draw(2);
        tables[k].layout = (fairfold_layout){ITEMS * FACTORS, head, held, chunk, state, draw(2)};
    }
    for (int k = 0; k < 4; k++) dense[k].layout = (fairfold_layout){sizes[k], sizes[k], 0, 1, 0, 1};
    int64_t numbers[] = {12, 2 + (int64_t)draw(2), 3}, dense_count = 4; /* samples, their width, steps */
    switch (draw(6)) {
    case 0: spoil((int64_t *)&tables[draw(2)].layout, 4, 1 + (int)draw(2)); break;
    case 1: spoil((int64_t *)&dense[draw(4)].layout, 4, 1 + (int)draw(2)); break;
    case 2: spoil(form, 6, 1 + (int)draw(2)); break;
    case 3: spoil(numbers, 3, 1 + (int)draw(2)); break;
    case 4: spoil(&dense_count, 1, 1), spoil(units, 1, (int)draw(2)); break;
    default: break;
    }
    if (dense_count > 4) dense_count = 4;
    for (int k = 0; k < 6; k++) {
        fairfold_tensor *of = k < 2 ? &tables[k] : &dense[k - 2];
        of->values = length_of(of) < 0 ? NULL : vector(length_of(of));
    }
    const int64_t columns[] = {form[0], form[1]};
    float *own[2], *kept[2];
    for (int k = 0; k < 2; k++) own[k] = columns[k] < 0 || columns[k] > MOST ? NULL : vector(columns[k]);
    const fairfold_device_model model = {
        .form = {form[0], form[1], form[2], form[3] > 1 ? 1 : form[3], units, form[4], form[5], 1e-6, form[6], 0.1},
        .tables = {tables[0], tables[1]}, .dense = dense, .dense_count = dense_count, .user = {own[0], own[1]},
    };
    const int64_t samples_built = numbers[0] > 0 && numbers[0] <= MOST ? numbers[0] : 0;
    const int64_t entries = numbers[1] > 0 && numbers[1] <= MOST ? samples_built * numbers[1] : 0;
    const int64_t steps = numbers[2] > 0 && numbers[2] <= MOST ? numbers[2] : 0;
    int64_t *items = malloc((size_t)entries * sizeof *items + !entries);
    int64_t *ends = malloc((size_t)steps * sizeof *ends + !steps);
    for (int64_t k = 0; k < entries; k++) items[k] = draw(40) ? (int64_t)draw(ITEMS) : odd(ITEMS);
    for (int64_t k = 0; k < steps; k++) ends[k] = k + 1 == steps ? numbers[0] : draw(30) ? 4 * (k + 1) : odd(4);
    float *targets = form[5] ? vector(samples_built) : NULL;
    const fairfold_device_samples samples = {
        entries ? items : NULL, numbers[0], numbers[1], targets, steps ? ends : NULL, numbers[2],
    };
    int64_t size = fairfold_device_train_bytes(&model, numbers[0], numbers[1]);
    if (size >= 0 && size < 1 << 24) {
        if (!draw(8)) size = (int64_t)draw((uint64_t)size + 1); /* too little memory */
        void *memory = aligned_alloc(64, (size_t)(size + 64) / 64 * 64);
        for (int k = 0; k < 2; k++) {
            kept[k] = vector(columns[k]);
            memcpy(kept[k], own[k], (size_t)columns[k] * sizeof *own[k]);
        }
        const int status = fairfold_device_train(&model, &samples, memory, size);
        for (int k = 0; k < 2; k++) {
            if (status && memcmp(kept[k], own[k], (size_t)columns[k] * sizeof *own[k])) abort(); /* refused, and changed */
            free(kept[k]);
        }
        counts[status]++;
        free(memory);
    } else counts[FAIRFOLD_BAD_ARGUMENT]++;
    size = fairfold_device_scores_bytes(&model);
    if (size >= 0 && size < 1 << 24) {
        const int64_t first = draw(6) ? (int64_t)draw(ITEMS) : odd(ITEMS), count = (int64_t)draw(20);
        if (!draw(8)) size = (int64_t)draw((uint64_t)size + 1);
        void *memory = aligned_alloc(64, (size_t)(size + 64) / 64 * 64);
        float *scores = vector(count);
        counts[fairfold_device_scores(&model, first, count, scores, memory, size)]++;
        free(scores), free(memory);
    }
    for (int k = 0; k < 2; k++) free(tables[k].values), free(own[k]);
    for (int k = 0; k < 4; k++) free(dense[k].values);
    free(items), free(ends), free(targets);
}

static void draw_samples(int *counts) {
    int64_t numbers[] = {1 + (int64_t)draw(9), ITEMS, 2, 1}; /* of the history, catalogue, epochs, negatives */
    int64_t history[16], place = 0;
    for (int k = 0; k < 16; k++) history[k] = place += 1 + (int64_t)draw(3);
    if (draw(2)) spoil(numbers + 1, 3, 1);
    if (!draw(3)) spoil(history, (int)numbers[0], 1);
    const int64_t all[] = {numbers[0], numbers[2], numbers[3] < MOST ? 1 + numbers[3] : MOST};
    int64_t total = 1;
    for (int k = 0; k < 3; k++)
        total = all[k] >= 0 && all[k] <= MOST && total <= MOST ? total * all[k] : MOST + 1;
    if (total > MOST) return; /* the caller brings this memory */
    int64_t *items = malloc((size_t)total * sizeof *items + !total);
    const int shuffle = (int)draw(2);
    counts[fairfold_device_sample(history, numbers[0], numbers[1], numbers[2], numbers[3], shuffle, state, items)]++;
    free(items);
}

static void read_packed_rows(int *counts) {
    int64_t numbers[] = {1 + (int64_t)draw(30), 1 + (int64_t)draw(20), 2 + (int64_t)draw(7)}; /* rows, columns, bits */
    const int64_t size = numbers[0] * (2 + (numbers[1] * numbers[2] + 7) / 8), many = 1 + (int64_t)draw(3);
    uint8_t *content = malloc((size_t)size);
    for (int64_t k = 0; k < size; k++) content[k] = (uint8_t)draw(256);
    const int64_t rows = numbers[0], columns = numbers[1];
    if (draw(2)) spoil(numbers, 3, 1);
    if (numbers[1] > columns) numbers[1] = draw(2) ? columns : INT64_MAX; /* vectors are the caller's */
    const int64_t given = draw(6) ? size : (int64_t)draw((uint64_t)size);
    const fairfold_packed table = {content, given, numbers[0], numbers[1], numbers[2]};
    int64_t ids[8];
    for (int k = 0; k < 8; k++) ids[k] = draw(30) ? (int64_t)draw((uint64_t)rows) : odd(rows);
    float *vectors = vector(many * columns), *products = vector(many * 8);
    float *factors = vector(8), *sum = vector(columns);
    counts[fairfold_packed_products(&table, ids, 8, vectors, many, products, 1)]++;
    counts[fairfold_packed_sum(&table, ids, 8, factors, sum)]++;
    free(content), free(vectors), free(products), free(factors), free(sum);
}

static void sum_pairs(int *counts) {
    int64_t items[24], begins[4], ends[4], columns = 12;
    for (int k = 0; k < 4; k++) begins[k] = 6 * k, ends[k] = 6 * k + 6;
    for (int k = 0; k < 24; k++) items[k] = 2 * (k % 6) + (int64_t)draw(2);
    if (draw(2)) spoil(draw(2) ? begins : ends, 4, 1);
    if (!draw(3)) spoil(items, 24, 1);
    if (!draw(4)) columns = odd(columns);
    const int64_t room = columns < 0 || columns > 80 ? MOST : columns * (columns + 1) / 2;
    float weights[] = {1, 0.5f, 0.25f, 2}, *total = vector(room);
    counts[fairfold_pair_sums(items, 24, begins, ends, 4, 4, weights, columns, total, room, 1)]++;
    free(total);
}

int main(int count, char **words) {
    int counts[8] = {0};
    state = count > 2 ? strtoull(words[2], NULL, 10) : 1;
    for (long left = count > 1 ? atol(words[1]) : 2000; left--;) {
        train_and_score(counts);
        draw_samples(counts);
        read_packed_rows(counts);
        sum_pairs(counts);
    }
    for (int status = 0; status < 8; status++) printf("%d ", counts[status]);
    printf("\n");
    return 0;
}
