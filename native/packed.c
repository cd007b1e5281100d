/* Checks before a table in few bits is read. */
#include "plan.h"

static int check(const fairfold_packed *table, const int64_t *ids, int64_t count) {
    if (!table || table->rows < 0 || table->columns < 1 || table->bits < 2 || table->bits > 8) return FAIRFOLD_BAD_ARGUMENT;
    if (table->columns > FAIRFOLD_PACKED_COLUMNS || table->rows > INT32_MAX) return FAIRFOLD_UNSUPPORTED;
    if (table->size != table->rows * (2 + (table->columns * table->bits + 7) / 8)) return FAIRFOLD_BAD_ARGUMENT;
    if (count < 0 || (count && (!ids || !table->content))) return FAIRFOLD_BAD_ARGUMENT;
    for (int64_t at = 0; at < count; at++)
        if (ids[at] < 0 || ids[at] >= table->rows) return FAIRFOLD_BAD_ROW;
    return FAIRFOLD_OK;
}

int fairfold_packed_products(const fairfold_packed *table, const int64_t *ids, int64_t count, const float *vectors,
                             int64_t many, float *products, int threads) {
    const int status = check(table, ids, count);
    if (status != FAIRFOLD_OK) return status;
    if (many < 0 || (count && many && (!vectors || !products))) return FAIRFOLD_BAD_ARGUMENT;
    if (many > INT32_MAX || count > INT32_MAX) return FAIRFOLD_UNSUPPORTED;
    const fairfold_packed_job job = {table, ids, count, vectors, many, products};
    const int parts = fairfold_parts(threads, many * count > INT32_MAX ? INT32_MAX : many * count * 16);
    fairfold_parallel(parts, fairfold_active_body()->packed_products, &job);
    return FAIRFOLD_OK;
}

int fairfold_packed_sum(const fairfold_packed *table, const int64_t *ids, int64_t count, const float *factors,
                        float *sum) {
    const int status = check(table, ids, count);
    if (status != FAIRFOLD_OK) return status;
    if (!sum || (count && !factors)) return FAIRFOLD_BAD_ARGUMENT;
    const fairfold_packed_job job = {table, ids, count, factors, 1, sum};
    fairfold_active_body()->packed_sum(&job);
    return FAIRFOLD_OK;
}
