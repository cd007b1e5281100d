/* Which instruction set serves, and where threads come from. */
#include <string.h>

#include "plan.h"

#if defined(_OPENMP)
#include <omp.h>
#if !defined(_WIN32)
#include <pthread.h>
#endif
#endif

extern const fairfold_body fairfold_body_portable;
#ifdef FAIRFOLD_HAS_X86
extern const fairfold_body fairfold_body_avx2;
extern const fairfold_body fairfold_body_avx512;
#endif

static const fairfold_body *chosen = &fairfold_body_portable;
#if defined(_OPENMP)
static int forked = 0;
#endif

static int supported(const fairfold_body *body) {
#ifdef FAIRFOLD_HAS_X86
    __builtin_cpu_init();
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2");
    if (body == &fairfold_body_avx2) return avx2;
    if (body == &fairfold_body_avx512)
        return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw");
#endif
    return body == &fairfold_body_portable;
}

static const fairfold_body *const bodies[] = {
#ifdef FAIRFOLD_HAS_X86
    &fairfold_body_avx512,
    &fairfold_body_avx2,
#endif
    &fairfold_body_portable, /* last: serves everywhere */
};
#define BODIES ((int)(sizeof bodies / sizeof *bodies))

#if defined(_OPENMP) && !defined(_WIN32)
/* The threads of OpenMP do not survive a fork, and GNU's library waits for them for ever. A child works alone. */
static void after_fork(void) { forked = 1; }
#endif

uint64_t fairfold_front[1 << 8];

/* Here and not beside the loops that read it: what runs when the library is loaded must run on every processor. */
static void fill_front(void) {
    for (unsigned lanes = 0; lanes < 1 << 8; lanes++)
        for (unsigned lane = 0, to = 0; lane < 8; lane++)
            if (lanes >> lane & 1) fairfold_front[lanes] |= (uint64_t)lane << 8 * to++;
}

__attribute__((constructor)) static void choose(void) {
    fill_front();
    for (int i = BODIES - 1; i >= 0; i--)
        if (supported(bodies[i])) chosen = bodies[i];
#if defined(_OPENMP) && !defined(_WIN32)
    pthread_atfork(NULL, NULL, after_fork);
#endif
}

int fairfold_abi(void) { return FAIRFOLD_ABI; }

const char *fairfold_instructions(void) { return chosen->name; }

int fairfold_use_instructions(const char *name) {
    for (int i = 0; name && i < BODIES; i++)
        if (!strcmp(name, bodies[i]->name) && supported(bodies[i])) {
            chosen = bodies[i];
            return FAIRFOLD_OK;
        }
    return FAIRFOLD_BAD_ARGUMENT;
}

const fairfold_body *fairfold_active_body(void) { return chosen; }

int fairfold_threaded(void) {
#if defined(_OPENMP)
    return !forked;
#else
    return 0;
#endif
}

int fairfold_work_alone(void) {
#if defined(_OPENMP)
    omp_set_num_threads(1);
#endif
    return FAIRFOLD_OK;
}

/* Below this many coordinates a part costs less than waking a thread for it. Tests set it lower: then jobs are cut up
 * however small they are, and whether or not there are threads. */
#ifdef FAIRFOLD_WORTH_A_THREAD
#define CUT_ALWAYS 1
#else
#define CUT_ALWAYS 0
#define FAIRFOLD_WORTH_A_THREAD 16384
#endif
/* Scattering threads each hash everything, so many of them stop paying. */
#define MAX_PARTS 64

int fairfold_parts(int64_t threads, int64_t work) {
    if (threads <= 1 || !(CUT_ALWAYS || fairfold_threaded())) return 1;
    int64_t parts = work / FAIRFOLD_WORTH_A_THREAD;
    if (parts > threads) parts = threads;
    if (parts > MAX_PARTS) parts = MAX_PARTS;
    return parts < 1 ? 1 : (int)parts;
}

void fairfold_parallel(int parts, fairfold_part function, const void *job) {
#if defined(_OPENMP)
    if (parts > 1 && !forked) {
#pragma omp parallel for schedule(static, 1) num_threads(parts)
        for (int part = 0; part < parts; part++) function(job, part, parts);
        return;
    }
#endif
    for (int part = 0; part < parts; part++) function(job, part, parts);
}
