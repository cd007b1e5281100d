/* Steps up and down a nested chain of sizes. */
#include "plan.h"

static int check_groups(const void *small, int64_t small_size, const void *big, int64_t big_size, int64_t repeats,
                        int64_t chunk) {
    if (small_size < 0 || big_size < 0 || repeats < 1 || chunk < 1 || small_size % chunk) return FAIRFOLD_BAD_ARGUMENT;
    if (big_size % repeats || big_size / repeats != small_size) return FAIRFOLD_BAD_ARGUMENT;
    return small_size && (!small || !big) ? FAIRFOLD_BAD_ARGUMENT : FAIRFOLD_OK;
}

int fairfold_fold_groups(int kind, const void *source, int64_t source_size, int64_t repeats, int64_t chunk,
                         void *target, int64_t target_size, int threads) {
    const int index = kind == 4 ? 0 : kind == 8 ? 1 : kind == -4 ? 2 : -1;
    int status = check_groups(target, target_size, source, source_size, repeats, chunk);
    if (index < 0) return FAIRFOLD_BAD_ARGUMENT;
    if (status != FAIRFOLD_OK || target_size == 0) return status;
    fairfold_plain_job job = {.source = source, .target = target, .size = target_size};
    job.repeats = repeats, job.chunk = chunk;
    fairfold_parallel(fairfold_parts(threads, source_size), fairfold_active_body()->fold[index], &job);
    return FAIRFOLD_OK;
}

int fairfold_unfold_groups(int real, const void *source, int64_t source_size, int64_t repeats, int64_t chunk,
                           void *target, int64_t target_size, int add, int threads) {
    int status = check_groups(source, source_size, target, target_size, repeats, chunk);
    if (real != 4 && real != 8) return FAIRFOLD_BAD_ARGUMENT;
    if (status != FAIRFOLD_OK || source_size == 0) return status;
    fairfold_plain_job job = {.source = source, .target = target, .size = source_size};
    job.repeats = repeats, job.chunk = chunk, job.add = add;
    fairfold_parallel(fairfold_parts(threads, target_size), fairfold_active_body()->unfold[real == 8], &job);
    return FAIRFOLD_OK;
}
