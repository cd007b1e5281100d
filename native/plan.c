/* Checks of what comes in, and the cutting of rows and ranges into pieces. */
#include "plan.h"

#include <stddef.h>

#define LARGEST ((int64_t)1 << 62) /* sums of two such numbers fit */
#define MAX_BLOCKS ((int64_t)1 << 31)

static uint64_t divisor(uint64_t a, uint64_t b) {
    while (b) {
        uint64_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

int fairfold_check_layout(const fairfold_layout *layout) {
    if (!layout) return FAIRFOLD_BAD_ARGUMENT;
    if (layout->full_size < 0 || layout->full_size > LARGEST || layout->head < 0 || layout->head > layout->full_size)
        return FAIRFOLD_BAD_LAYOUT;
    if (layout->chunk < 1 || layout->tail < 0 || layout->tail > LARGEST || layout->tail % layout->chunk)
        return FAIRFOLD_BAD_LAYOUT;
    if (layout->tail / layout->chunk > MAX_BLOCKS) return FAIRFOLD_BAD_LAYOUT;
    if (layout->tail == 0 && layout->head != layout->full_size) return FAIRFOLD_BAD_LAYOUT;
    if (layout->chunk > MAX_BLOCKS) return FAIRFOLD_UNSUPPORTED;
    return FAIRFOLD_OK;
}

int fairfold_check_rows(const fairfold_layout *layout, const fairfold_rows *rows) {
    if (!rows || (rows->row_bytes != 4 && rows->row_bytes != 8)) return FAIRFOLD_BAD_ARGUMENT;
    if (rows->row_size < 1 || rows->count < 0 || (rows->count && !rows->ids)) return FAIRFOLD_BAD_ARGUMENT;
    if (rows->count > LARGEST / 16 / rows->row_size) return FAIRFOLD_BAD_ARGUMENT;
    /* Below 0, or beyond the last: either way a sign bit. Signs add up on the plainest of vectors, without an early exit,
     * where comparing 64 bits needs better ones. */
    const int64_t last = layout->full_size / rows->row_size - 1;
    int64_t signs = 0;
    if (rows->row_bytes == 8) {
        const int64_t *ids = rows->ids;
        for (int64_t i = 0; i < rows->count; i++) signs |= ids[i] | (int64_t)((uint64_t)last - (uint64_t)ids[i]);
    } else {
        const int32_t *ids = rows->ids;
        for (int64_t i = 0; i < rows->count; i++) signs |= (int64_t)ids[i] | (last - (int64_t)ids[i]);
    }
    return signs < 0 ? FAIRFOLD_BAD_ROW : FAIRFOLD_OK;
}

/* Everything of a plan that follows from layout and unit. `head_spots` and `base` are the caller's. */
static int finish_plan(const fairfold_layout *layout, uint64_t unit, uint64_t spots, fairfold_plan *plan) {
    if (spots > UINT32_MAX) return FAIRFOLD_UNSUPPORTED;
    const uint64_t ratio = layout->tail ? (uint64_t)layout->chunk / unit : 1;
    plan->key = layout->key;
    plan->keys = fairfold_keys_of(layout->key, 0);
    plan->blocks = (uint32_t)(layout->tail / layout->chunk);
    plan->unit = (uint32_t)unit;
    plan->ratio = (uint32_t)ratio;
    plan->ratio_shift = -1;
    for (int shift = 0; shift < 32; shift++)
        if (ratio == (uint64_t)1 << shift) plan->ratio_shift = shift;
    plan->sign_mask = layout->is_signed ? UINT32_MAX : 0;
    plan->spots = spots;
    plan->wide = (uint64_t)layout->full_size / unit > UINT32_MAX;
    return FAIRFOLD_OK;
}

int fairfold_plan_rows(const fairfold_layout *layout, const fairfold_rows *rows, fairfold_job *job) {
    int status = fairfold_check_layout(layout);
    if (status == FAIRFOLD_OK) status = fairfold_check_rows(layout, rows);
    if (status != FAIRFOLD_OK) return status;
    uint64_t unit = (uint64_t)rows->row_size;
    if (layout->tail) {
        unit = divisor(unit, (uint64_t)layout->chunk);
        unit = divisor(unit, (uint64_t)layout->head);
    }
    if (unit > FAIRFOLD_MAX_UNIT || (layout->tail && layout->chunk > FAIRFOLD_MAX_UNIT))
        unit = divisor(unit, FAIRFOLD_MAX_UNIT);
    *job = (fairfold_job){.ids = rows->ids, .row_bytes = (int)rows->row_bytes, .row_count = rows->count, .scale = 1};
    job->row_units = (uint64_t)rows->row_size / unit;
    const uint64_t head_spots = (uint64_t)layout->head / unit;
    status = finish_plan(layout, unit, head_spots + (uint64_t)layout->tail / unit, &job->plan);
    job->plan.head_spots = (uint32_t)head_spots;
    return status;
}

int fairfold_plan_move(const fairfold_move *move, fairfold_job *job) {
    if (!move) return FAIRFOLD_BAD_ARGUMENT;
    const int status = fairfold_plan_rows(&move->layout, &move->rows, job);
    if (status != FAIRFOLD_OK || move->rows.count == 0) return status;
    if ((move->real != 4 && move->real != 8) || move->size != move->layout.head + move->layout.tail)
        return FAIRFOLD_BAD_ARGUMENT;
    return move->compact && move->values ? FAIRFOLD_OK : FAIRFOLD_BAD_ARGUMENT;
}

/* The longest piece that suits every whole chunk. */
uint32_t fairfold_run_unit(const fairfold_layout *layout) {
    if (layout->chunk <= FAIRFOLD_MAX_UNIT) return (uint32_t)layout->chunk;
    return (uint32_t)divisor((uint64_t)layout->chunk, FAIRFOLD_MAX_UNIT);
}

/* Hashed coordinates only: start >= head, and start and length are multiples of the unit. */
int fairfold_plan_run(const fairfold_layout *layout, uint32_t unit, int64_t start, int64_t length, fairfold_job *job) {
    *job = (fairfold_job){.row_count = 1, .scale = 1};
    job->row_units = (uint64_t)length / unit;
    job->first_unit = (uint64_t)start / unit;
    job->plan.base = layout->head;
    return finish_plan(layout, unit, (uint64_t)layout->tail / unit, &job->plan);
}
