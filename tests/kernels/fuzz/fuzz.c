/* Calls every entry of the C ABI with random and hostile arguments, for as long as given, under the sanitizers.
 *
 * Buffers are exactly as long as the arguments say, on the heap, so that one byte too far is an error of the address
 * sanitizer. Integers are drawn near the edges (0, 1, powers of two, the ends of their types). What is checked here is
 * that nothing crashes; that results are right is the harness's business. With more than one thread, each calls on its
 * own, with the instruction set of its seed, under the thread sanitizer.
 *
 *     fuzz SECONDS [SEED [THREADS]]
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "../../../native/fairfold.h"

#define MOST 4096 /* values in a buffer */

static _Thread_local uint64_t state;

static uint64_t next(void) { /* splitmix64 */
    uint64_t word = state += 0x9E3779B97F4A7C15u;
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9u;
    word = (word ^ (word >> 27)) * 0x94D049BB133111EBu;
    return word ^ (word >> 31);
}

static int64_t below(int64_t limit) { return limit > 0 ? (int64_t)(next() % (uint64_t)limit) : 0; }
static int chance(int in) { return below(in) == 0; }

/* An integer that may be anything, mostly near an edge. */
static int64_t hostile(void) {
    static const int64_t edges[] = {0, 1, 2, 31, 32, 33, 255, 65536, INT32_MAX, (int64_t)1 << 32, (int64_t)1 << 62};
    int64_t edge = edges[below(11)];
    switch (below(6)) {
    case 0: return INT64_MAX - below(3);
    case 1: return INT64_MIN + below(3);
    case 2: return -below(3);
    case 3: return (int64_t)next();
    default: return edge + below(5) - 2;
    }
}

static int64_t sane_or_hostile(int64_t sane) { return chance(24) ? hostile() : sane; }

static fairfold_layout random_layout(void) {
    static const int64_t chunks[] = {1, 1, 2, 4, 8, 16, 32, 33, 48, 64, 100};
    fairfold_layout layout;
    layout.chunk = sane_or_hostile(chunks[below(11)]);
    layout.full_size = sane_or_hostile(chance(8) ? below((int64_t)1 << 60) : 1 + below(MOST));
    int64_t blocks = 1 + below(20);
    layout.tail = layout.chunk > 0 && layout.chunk < MOST ? blocks * layout.chunk : below(MOST);
    layout.head = chance(2) ? 0 : below(layout.full_size > MOST ? MOST : layout.full_size + 1);
    if (chance(10)) layout.head = layout.full_size, layout.tail = 0;
    layout.tail = sane_or_hostile(layout.tail);
    layout.head = sane_or_hostile(layout.head);
    layout.key = next();
    layout.is_signed = chance(8) ? hostile() : below(2);
    return layout;
}

/* A buffer of exactly `count` entries of `width` bytes, never 0 so that it is not NULL. */
static void *buffer(int64_t count, int width) {
    size_t bytes = (size_t)count * (size_t)width;
    unsigned char *made = malloc(bytes ? bytes : 1);
    if (!made) abort();
    memset(made, 0x3c, bytes ? bytes : 1); /* small finite floats and doubles */
    return made;
}

static int64_t size_of(const fairfold_layout *layout) {
    if (layout->head < 0 || layout->tail < 0 || layout->head > 2 * MOST || layout->tail > 2 * MOST) return below(MOST);
    return layout->head + layout->tail;
}

static void *random_ids(const fairfold_layout *layout, int width, int64_t count, int64_t row_size) {
    int64_t rows = row_size > 0 && layout->full_size > 0 ? layout->full_size / row_size : 1;
    char *ids = buffer(count, width);
    for (int64_t i = 0; i < count; i++) {
        int64_t id = chance(400) ? hostile() : below(rows);
        int32_t narrow = (int32_t)id;
        memcpy(ids + i * width, width == 8 ? (void *)&id : (void *)&narrow, (size_t)width);
    }
    return ids;
}

static void fuzz_rows(void) {
    fairfold_layout layout = random_layout();
    int real = chance(2) ? 4 : 8, width = chance(2) ? 4 : 8;
    int64_t row_size = 1 + below(70), count = chance(10) ? 0 : below(60), size = size_of(&layout);
    void *compact = buffer(size, real), *values = buffer(count * row_size, real);
    void *ids = random_ids(&layout, width, count, row_size);
    int64_t *slots = buffer(count * row_size, 8), touched = 0;
    void *sums = buffer(count * row_size, real);
    int32_t *positions = buffer(count * row_size, 4);
    int8_t *signs = buffer(count * row_size, 1);
    /* Lengths that do not match are given only where the call can refuse them: larger than the table, or negative. */
    fairfold_rows rows = {ids, chance(40) ? below(20) : width, count, row_size};
    if (rows.row_bytes > width) rows.row_bytes = 3;
    if (chance(40)) rows.count = -1 - below(5);
    if (chance(40)) rows.row_size = -below(3);
    int64_t given = chance(20) ? hostile() : size;
    if (given == layout.head + (uint64_t)layout.tail) given = size;
    int kind = chance(40) ? (int)hostile() : real, threads = 1 + (int)below(6);
    if (kind == 4 || kind == 8) kind = real;
    fairfold_move out = {layout, kind, compact, given, rows, sums, threads}, in = out;
    in.values = values;
    fairfold_recover_rows(chance(100) ? NULL : &out);
    fairfold_accumulate_rows(chance(100) ? NULL : &in, 0.5);
    int64_t room = count * row_size;
    int status = fairfold_touched_rows(&layout, kind, values, &rows, slots, sums, chance(20) ? room - 1 : room, &touched);
    if (status == FAIRFOLD_OK) {
        for (int64_t i = 0; i < room && touched; i++) positions[i] = (int32_t)below(touched), signs[i] = chance(2) ? 1 : -1;
        if (rows.count) {
            if (chance(5)) positions[below(room)] = (int32_t)hostile();
            fairfold_recover_positions(real, sums, touched, positions, signs, room, values, threads);
            fairfold_accumulate_positions(real, values, positions, signs, room, sums, touched);
        }
    }
    fairfold_touched_rows(&layout, 4, NULL, &rows, slots, NULL, room, &touched); /* refused */
    fairfold_slots_and_signs(&layout, width == 8 ? ids : NULL, width == 8 ? count : 0, slots, signs);
    free(compact), free(values), free(ids), free(slots), free(sums), free(positions), free(signs);
}

static void fuzz_ranges(void) {
    fairfold_layout layout = random_layout();
    int real = chance(2) ? 4 : 8, threads = 1 + (int)below(6);
    int64_t size = size_of(&layout), length = chance(3) ? below(20) : below(20 * MOST);
    int64_t start = sane_or_hostile(below(layout.full_size));
    if (layout.full_size > 0 && length > layout.full_size && !chance(4)) length = below(layout.full_size + 1), start = 0;
    void *compact = buffer(size, real), *values = buffer(length, real);
    int32_t *counts = buffer(size, 4);
    int64_t given = chance(20) ? -below(5) : length;
    fairfold_recover_range(&layout, real, compact, size, start, given, values, threads);
    fairfold_accumulate_range(&layout, real, values, start, given, compact, chance(2) ? counts : NULL, size, threads);
    fairfold_count_range(&layout, start, given, counts, size, threads);
    free(values);
    /* The whole vector is as long as the layout says, where that is a length one can have. */
    int64_t whole = layout.full_size < 0 || layout.full_size > 20 * MOST ? 0 : layout.full_size;
    values = buffer(whole, real);
    fairfold_reduce(whole ? &layout : NULL, real, values, compact, size, threads);
    free(compact), free(values), free(counts);
}

static void fuzz_chain(void) {
    int real = chance(2) ? 4 : 8, threads = 1 + (int)below(6);
    int64_t chunk = 1 + below(20), groups = below(60), repeats = 1 + below(6);
    int64_t small_size = groups * chunk, big_size = small_size * repeats;
    void *small = buffer(small_size, real), *big = buffer(big_size, real);
    int64_t claimed_repeats = sane_or_hostile(repeats), claimed_chunk = sane_or_hostile(chunk);
    fairfold_fold_groups(real, big, big_size, claimed_repeats, claimed_chunk, small, small_size, threads);
    fairfold_unfold_groups(real, small, small_size, claimed_repeats, claimed_chunk, big, big_size, (int)below(2), threads);
    if (real == 4) fairfold_fold_groups(-4, big, big_size, claimed_repeats, claimed_chunk, small, small_size, threads);
    free(small), free(big);
}

static void fuzz_number(void) {
    int64_t count = below(200), found;
    int64_t *keys = buffer(count, 8), *distinct = buffer(count, 8);
    int32_t *numbers = buffer(count, 4);
    for (int64_t i = 0; i < count; i++) keys[i] = chance(3) ? hostile() : below(50);
    fairfold_number(keys, chance(20) ? -below(5) : count, numbers, distinct, chance(40) ? NULL : &found);
    free(keys), free(distinct), free(numbers);
}

/* Places of a table, now and then one that points outside. */
static fairfold_places random_places(int64_t count, int64_t size) {
    int32_t *positions = buffer(count, 4);
    int8_t *signs = buffer(count, 1);
    for (int64_t i = 0; i < count; i++) {
        positions[i] = chance(20000) ? (int32_t)hostile() : (int32_t)below(size);
        signs[i] = (int8_t)(below(3) - 1);
    }
    return (fairfold_places){positions, signs};
}

static void free_places(fairfold_places places) { free((void *)places.positions), free((void *)places.signs); }

static void fuzz_train(void) {
    int real = chance(2) ? 4 : 8;
    int64_t units[3] = {1 + below(9), 1 + below(9), 1 + below(9)};
    fairfold_model model = {.layers = below(4), .units = units, .rate = 0.1, .l2 = 0.01};
    model.product = model.layers ? below(12) : 1 + below(12);
    if (model.layers) model.user = below(9), model.item = 1 + below(9);
    model.output = below(2), model.loss = below(3), model.optimizer = below(3);
    int64_t dense = 0, inputs = model.user + model.item;
    for (int64_t i = 0; i < model.layers; i++) dense += units[i] * (inputs + 1), inputs = units[i];
    if (model.output) dense += model.product + inputs + 1;
    fairfold_client client = {.size = 1 + below(200), .rows = 1 + below(30), .count = 1 + below(40)};
    client.width = model.loss == FAIRFOLD_SQUARED ? 1 + below(2) : 2 + below(3);
    void *values = buffer(client.size, real), *pull = buffer(client.size, real), *targets = buffer(client.count, real);
    int32_t *samples = buffer(client.count * client.width, 4);
    for (int64_t i = 0; i < client.count * client.width; i++)
        samples[i] = chance(4000) ? (int32_t)hostile() : (int32_t)below(client.rows);
    client.values = values, client.samples = samples, client.targets = targets, client.pull = chance(2) ? pull : NULL;
    client.items[0] = random_places(client.rows * model.product, client.size);
    client.items[1] = random_places(client.rows * model.item, client.size);
    client.users[0] = random_places(model.product, client.size);
    client.users[1] = random_places(model.user, client.size);
    client.dense = random_places(dense, client.size);
    int64_t ends[3] = {1 + below(client.count), client.count, 0};
    client.ends = ends, client.steps = ends[0] < ends[1] ? 2 : 1;
    if (chance(20)) ends[below(2)] = hostile();
    fairfold_client given = client;
    fairfold_model claimed = model;
    switch (below(60)) { /* one lie at a time that the call can see */
    case 0: given.size = -below(4); break;
    case 1: given.width = -below(4); break;
    case 2: given.steps = -1 - below(4); break;
    case 3: given.values = NULL; break;
    case 4: given.dense.signs = NULL; break;
    case 5: claimed.layers = chance(2) ? 65 + below(9) : -1 - below(9); break;
    case 6: claimed.optimizer = 3 + below(9); break;
    case 7: claimed.product = -1 - below(4); break;
    default: break;
    }
    if (given.dense.signs || dense) fairfold_train(&claimed, chance(40) ? 5 : real, &given);
    free(values), free(pull), free(targets), free(samples);
    free_places(client.items[0]), free_places(client.items[1]);
    free_places(client.users[0]), free_places(client.users[1]), free_places(client.dense);
}

/* The matrix of such a list, and blocks of it. */
static void fuzz_matrix(int64_t *places, int real, const void *sums, int64_t count, int64_t rows) {
    int64_t bytes = chance(2) ? 4 : 8, room = 2 * count, width = below(5), found = 0, blocks_room = rows * width * width;
    int number_real = chance(2) ? 4 : 8;
    if (chance(20)) places[below(count)] = hostile();
    int64_t *starts = buffer(rows, 8), *members = buffer(rows * width, 8);
    void *columns = buffer(room, (int)bytes), *numbers = buffer(room, number_real);
    void *blocks = buffer(blocks_room, number_real);
    double *diagonal = buffer(rows, 8);
    for (int64_t k = 0; k < rows * width; k++) members[k] = chance(400) ? hostile() : below(rows);
    if (fairfold_symmetric_rows(places, real, sums, count, rows, starts, chance(40) ? 5 : bytes, columns, number_real,
                                numbers, chance(40) ? below(9) : room, diagonal, &found) == FAIRFOLD_OK) {
        if (chance(20)) starts[below(rows)] = hostile();
        if (chance(20) && bytes == 4) ((int32_t *)columns)[below(found)] = (int32_t)hostile();
        if (chance(20) && bytes == 8) ((int64_t *)columns)[below(found)] = hostile();
        double weights[64];
        int64_t most = below(4), nearest[64 * 4];
        double strengths[64 * 4];
        for (int k = 0; k < 64; k++) weights[k] = 1;
        fairfold_strongest(starts, bytes, columns, number_real, numbers, found, rows, weights,
                           chance(2) ? weights : NULL, most, nearest, strengths, chance(40) ? hostile() : rows * most,
                           1 + (int)below(6));
        fairfold_member_blocks(starts, bytes, columns, number_real, numbers, found, rows, members,
                               chance(40) ? hostile() : width, blocks, chance(40) ? hostile() : blocks_room,
                               1 + (int)below(6));
    }
    free(starts), free(members), free(columns), free(numbers), free(blocks), free(diagonal);
}

static void fuzz_pairs(void) {
    int real = chance(2) ? 4 : 8;
    int64_t histories = below(12), columns = below(40), size = 0, *begins = buffer(histories, 8), *ends = buffer(histories, 8);
    int64_t *items = buffer(histories * 20, 8);
    for (int64_t u = 0; u < histories; u++) {
        begins[u] = size;
        for (int64_t item = below(6); size < begins[u] + 20 && item < 50; item += 1 + below(9)) items[size++] = item;
        ends[u] = size;
    }
    if (size && chance(20)) items[below(size)] = hostile();
    if (histories && chance(20)) *(chance(2) ? begins : ends) = hostile();
    int64_t room = columns * (columns + 1) / 2, given = sane_or_hostile(columns);
    void *total = buffer(room, real), *weights = buffer(histories, real);
    fairfold_pair_sums(items, size, begins, ends, chance(40) ? -1 : histories, chance(40) ? 5 : real, weights,
                       given, chance(40) && room ? NULL : total, room, 1 + (int)below(6));
    int64_t found = 0, listed = 0;
    for (int64_t u = 0; u < histories; u++) listed += 210;
    int64_t *places = buffer(listed, 8);
    void *sums = buffer(listed, real);
    if (fairfold_listed_pair_sums(items, size, begins, ends, chance(40) ? -1 : histories, real, weights, columns,
                                  places, sums, chance(20) ? below(9) : listed, &found) == FAIRFOLD_OK && found)
        fuzz_matrix(places, real, sums, found, columns);
    free(items), free(begins), free(ends), free(total), free(weights), free(places), free(sums);
}

static void fuzz_packed(void) {
    fairfold_packed table = {.rows = 1 + below(20), .columns = 1 + below(70), .bits = 2 + below(7)};
    table.size = table.rows * (2 + (table.columns * table.bits + 7) / 8);
    uint8_t *content = buffer(table.size, 1);
    for (int64_t i = 0; i < table.size; i++) content[i] = (uint8_t)next();
    table.content = content;
    int64_t count = below(30), many = below(4), *ids = buffer(count, 8);
    for (int64_t i = 0; i < count; i++) ids[i] = chance(400) ? hostile() : below(table.rows);
    float *vectors = buffer(many * table.columns, 4), *products = buffer(many * count, 4);
    float *factors = buffer(count, 4), *sum = buffer(table.columns, 4);
    fairfold_packed claimed = table;
    switch (below(20)) {
    case 0: claimed.bits = hostile(); break;
    case 1: claimed.rows = hostile(); break;
    case 2: claimed.size = hostile(); break;
    case 3: claimed.content = NULL; break;
    default: break;
    }
    fairfold_packed_products(&claimed, ids, count, vectors, chance(40) ? -1 : many, products, 1 + (int)below(6));
    fairfold_packed_sum(&claimed, ids, chance(40) ? -1 : count, factors, sum);
    free(content), free(ids), free(vectors), free(products), free(factors), free(sum);
}

static double seconds;
static const char *const sets[] = {"portable", "avx2", "avx512"};

/* Rounds of calls until the time is up. One thread tries all instruction sets in turn; several share one, which is
 * chosen before they start. */
static long rounds_of_calls(int alone) {
    struct timespec begin, now;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    long rounds = 0;
    do {
        if (alone) fairfold_use_instructions(sets[rounds % 3]);
        fuzz_rows();
        fuzz_ranges();
        fuzz_chain();
        fuzz_number();
        fuzz_train();
        fuzz_pairs();
        fuzz_packed();
        rounds++;
        clock_gettime(CLOCK_MONOTONIC, &now);
    } while ((double)(now.tv_sec - begin.tv_sec) + 1e-9 * (double)(now.tv_nsec - begin.tv_nsec) < seconds);
    return rounds;
}

static void *one_of_several(void *seed) {
    state = *(uint64_t *)seed;
    *(uint64_t *)seed = (uint64_t)rounds_of_calls(0);
    return NULL;
}

int main(int count, char **arguments) {
    seconds = count > 1 ? atof(arguments[1]) : 1;
    state = count > 2 ? strtoull(arguments[2], NULL, 10) : (uint64_t)time(NULL);
    int threads = count > 3 ? atoi(arguments[3]) : 1;
    printf("seed %llu\n", (unsigned long long)state);
    fflush(stdout);
    long rounds = 0;
    if (threads < 2) {
        rounds = rounds_of_calls(1);
    } else {
        fairfold_use_instructions(sets[state % 3]);
        pthread_t workers[64];
        uint64_t seeds[64];
        if (threads > 64) return 1;
        for (int i = 0; i < threads; i++) seeds[i] = next();
        for (int i = 0; i < threads; i++)
            if (pthread_create(&workers[i], NULL, one_of_several, &seeds[i])) return 1;
        for (int i = 0; i < threads; i++) pthread_join(workers[i], NULL), rounds += (long)seeds[i];
    }
    printf("%ld rounds\n", rounds);
    return 0;
}
