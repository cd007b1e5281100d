/* A client of NeuMF in C alone: draws its samples, trains a round, scores the catalogue, and prints what came of it. */
#include <stdint.h>
#include <stdio.h>

#include "../../native/device/fairfold_device.h"

#define FACTORS 8
#define ITEMS 400
#define HELD (ITEMS * FACTORS / 4) /* of each table: a quarter */
#define HISTORY 70
#define EPOCHS 5

static float tables[2][HELD], layer[FACTORS * 2 * FACTORS], layer_bias[FACTORS], output[2 * FACTORS], output_bias[1];
static float own[2][FACTORS], scores[ITEMS];
static int64_t history[HISTORY], samples[EPOCHS * HISTORY * 2], ends[EPOCHS];
static _Alignas(64) char memory[1 << 20];

static void fill(float *values, int64_t count, uint32_t seed) { /* numbers that every machine has exactly */
    for (int64_t k = 0; k < count; k++) {
        seed = seed * 1664525u + 1013904223u;
        values[k] = (float)((int32_t)(seed >> 16) - 32768) / (1 << 18);
    }
}

int main(void) {
    const fairfold_layout hashed = {ITEMS * FACTORS, 0, HELD, 1, 0x123456789ABCDEF0u, 1};
#define WHOLE(size) {size, size, 0, 1, 0, 1}
    const fairfold_tensor dense[] = {
        {WHOLE(FACTORS * 2 * FACTORS), layer}, {WHOLE(FACTORS), layer_bias},
        {WHOLE(2 * FACTORS), output}, {WHOLE(1), output_bias},
    };
    const int64_t units[] = {FACTORS};
    const fairfold_device_model model = {
        .form = {FACTORS, FACTORS, FACTORS, 1, units, 1, 0, 1e-6, 2, 1e-3},
        .tables = {{hashed, tables[0]}, {hashed, tables[1]}},
        .dense = dense, .dense_count = 4, .user = {own[0], own[1]},
    };
    fill(tables[0], HELD, 1), fill(tables[1], HELD, 2), fill(layer, FACTORS * 2 * FACTORS, 3);
    fill(output, 2 * FACTORS, 4), fill(own[0], FACTORS, 5), fill(own[1], FACTORS, 6);
    for (int64_t k = 0; k < HISTORY; k++) history[k] = 5 * k;
    for (int64_t k = 0; k < EPOCHS; k++) ends[k] = HISTORY * (k + 1);
    int status = fairfold_device_sample(history, HISTORY, ITEMS, EPOCHS, 1, 1, 7, samples);
    const fairfold_device_samples round = {samples, EPOCHS * HISTORY, 2, NULL, ends, EPOCHS};
    printf("bytes %d\n", (int)fairfold_device_train_bytes(&model, round.count, round.width));
    if (!status) status = fairfold_device_train(&model, &round, memory, sizeof memory);
    if (!status) status = fairfold_device_scores(&model, 0, ITEMS, scores, memory, sizeof memory);
    uint32_t sum = 0;
    for (int64_t k = 0; k < EPOCHS * HISTORY * 2; k++) sum = sum * 31 + (uint32_t)samples[k];
    printf("status %d\nsamples %u\n", status, (unsigned)sum);
    for (int k = 0; k < 8; k++) printf("user %.9g %.9g\n", (double)own[0][k], (double)own[1][k]);
    for (int k = 0; k < ITEMS; k += 40) printf("score %.9g\n", (double)scores[k]);
#ifdef __linux__
    FILE *file = fopen("/proc/self/status", "r");
    char line[256];
    while (file && fgets(line, sizeof line, file)) {
        int kilobytes;
        if (sscanf(line, "VmHWM: %d", &kilobytes) == 1) printf("peak %d\n", kilobytes);
    }
#endif
    return status;
}
