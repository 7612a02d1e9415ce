/* What every call passes: the scenario as it stands now, faults, initialisation, the device. */
#define _GNU_SOURCE
#include "double.h"

#include <dlfcn.h>
#include <fnmatch.h>
#include <limits.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

#define SLICE_MS 20

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct scenario scenario;
static unsigned long generation;
static struct stat seen;
static char seen_path[4096];
static int initialised; /* NVML counts nvmlInit against nvmlShutdown */
static struct nvmlDevice_st devices[MAX_GPUS];
static struct nvmlDevice_st instances[MAX_GPUS][MAX_INSTANCES];

static int same_file(const struct stat *a, const struct stat *b)
{
    return a->st_ino == b->st_ino && a->st_dev == b->st_dev && a->st_size == b->st_size &&
           a->st_mtim.tv_sec == b->st_mtim.tv_sec && a->st_mtim.tv_nsec == b->st_mtim.tv_nsec;
}

static void refresh(void)
{
    const char *path = getenv("GPUIDLE_NVML_SCENARIO");
    struct stat now = {0};
    if (!path || strlen(path) >= sizeof seen_path) path = "";
    if (stat(path, &now)) memset(&now, 0, sizeof now);
    if (generation && same_file(&now, &seen) && !strcmp(path, seen_path)) return;
    scenario_read(&scenario, *path ? path : NULL);
    seen = now;
    strcpy(seen_path, path);
    generation++;
}

long long now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static long long now_ms(void)
{
    return now_ns() / 1000000;
}

/* Sleep without the lock. A changed scenario wakes the sleeper, so that a test can end a hang. */
static int slept_through(long long delay_ms)
{
    unsigned long before = generation;
    long long end = now_ms() + delay_ms;
    for (long long left = delay_ms; left > 0 && generation == before; left = end - now_ms()) {
        long long slice = left < SLICE_MS ? left : SLICE_MS;
        struct timespec pause = {0, slice * 1000000L};
        pthread_mutex_unlock(&lock);
        nanosleep(&pause, NULL);
        pthread_mutex_lock(&lock);
        refresh();
    }
    return generation == before;
}

static nvmlReturn_t apply_faults(const char *function, int index)
{
    nvmlReturn_t code;
    long long delay_ms;
    do {
        code = NVML_SUCCESS;
        delay_ms = 0;
        for (int i = 0; i < scenario.fault_count; i++) {
            struct fault *fault = &scenario.faults[i];
            if (fault->gpu != NO_GPU && fault->gpu != index) continue;
            if (fnmatch(fault->pattern, function, 0)) continue;
            if (fault->calls++ < fault->after_calls) continue;
            delay_ms += fault->delay_ms;
            if (code == NVML_SUCCESS) code = fault->code;
        }
    } while (!slept_through(delay_ms));
    return code;
}

static char own_path[PATH_MAX]; /* as it was when the library was loaded: its link may move */

__attribute__((constructor)) static void remember_path(void)
{
    Dl_info self;
    if (!dladdr((void *)remember_path, &self) || !realpath(self.dli_fname, own_path)) own_path[0] = '\0';
}

/* kernel_library FILE: the kernel driver takes no library but the one in a file of this name. */
static int fits_kernel(void)
{
    const char *wanted, *name = strrchr(own_path, '/');
    if (find_text(&scenario.system, "kernel_library", &wanted) != NVML_SUCCESS) return 1;
    return name && !strcmp(name + 1, wanted);
}

static struct call enter(const char *function, int index, int needs_init)
{
    struct call call = {.locked = 1, .scenario = &scenario, .index = index, .instance = WHOLE_GPU};
    pthread_mutex_lock(&lock);
    refresh();
    call.result = apply_faults(function, index);
    if (call.result == NVML_SUCCESS && !scenario.present) call.result = NVML_ERROR_DRIVER_NOT_LOADED;
    if (call.result == NVML_SUCCESS && !fits_kernel()) call.result = NVML_ERROR_LIB_RM_VERSION_MISMATCH;
    if (call.result == NVML_SUCCESS && needs_init && !initialised) call.result = NVML_ERROR_UNINITIALIZED;
    if (call.result != NVML_SUCCESS) call_leave(&call);
    return call;
}

void call_leave(struct call *call)
{
    if (call->locked) pthread_mutex_unlock(&lock);
    call->locked = 0;
}

static void refuse(struct call *call, nvmlReturn_t result)
{
    call->result = result;
    call_leave(call);
}

struct call call_enter(const char *function, int needs_init)
{
    return enter(function, NO_GPU, needs_init);
}

struct call call_enter_index(const char *function, unsigned int index)
{
    struct call call = enter(function, index < MAX_GPUS ? (int)index : NO_GPU, 1);
    if (call.result != NVML_SUCCESS) return call;
    if (index >= (unsigned int)scenario.gpu_count)
        refuse(&call, NVML_ERROR_INVALID_ARGUMENT);
    else
        call.gpu = &scenario.gpus[index];
    return call;
}

static int place_of(nvmlDevice_t device, int *index, int *instance)
{
    int mig = device >= &instances[0][0] && device < &instances[0][0] + MAX_GPUS * MAX_INSTANCES;
    if (!mig && !(device >= devices && device < devices + MAX_GPUS)) return 0;
    *index = mig ? (int)((device - &instances[0][0]) / MAX_INSTANCES) : (int)(device - devices);
    *instance = mig ? (int)((device - &instances[0][0]) % MAX_INSTANCES) : WHOLE_GPU;
    return 1;
}

struct call call_enter_device(const char *function, nvmlDevice_t device)
{
    int index = NO_GPU, instance = WHOLE_GPU;
    int known = place_of(device, &index, &instance);
    struct call call = enter(function, index, 1);
    if (call.result != NVML_SUCCESS) return call;
    call.instance = instance;
    if (!known)
        refuse(&call, NVML_ERROR_INVALID_ARGUMENT);
    else if (index >= scenario.gpu_count)
        refuse(&call, NVML_ERROR_GPU_IS_LOST);
    else if (instance == WHOLE_GPU)
        call.gpu = &scenario.gpus[index];
    else if (instance >= scenario.instance_count[index])
        refuse(&call, NVML_ERROR_INVALID_ARGUMENT); /* the instance is gone, and its handle with it */
    else
        call.gpu = &scenario.instances[index][instance];
    return call;
}

/* A call that concerns the GPU at `index` without a handle: faults of that GPU are its own too. */
struct call call_enter_events(const char *function, int index)
{
    return enter(function, index, 1);
}

/* Let others in for a while. Returns the milliseconds that passed; the scenario may be another one after. */
int call_pause(struct call *call, long long milliseconds)
{
    struct timespec pause = {milliseconds / 1000, milliseconds % 1000 * 1000000L};
    (void)call;
    pthread_mutex_unlock(&lock);
    nanosleep(&pause, NULL);
    pthread_mutex_lock(&lock);
    refresh();
    return (int)milliseconds;
}

nvmlDevice_t device_handle(int index)
{
    devices[index] = (struct nvmlDevice_st){index, WHOLE_GPU};
    return &devices[index];
}

nvmlDevice_t instance_handle(int index, int instance)
{
    instances[index][instance] = (struct nvmlDevice_st){index, instance};
    return &instances[index][instance];
}

/* The generated stubs end here: what is not implemented can still be made to fail or to hang. */
int double_stub(const char *function)
{
    struct call call = call_enter(function, 1);
    call_leave(&call);
    return call.result == NVML_SUCCESS ? NVML_ERROR_NOT_SUPPORTED : call.result;
}

nvmlReturn_t nvmlInitWithFlags(unsigned int flags)
{
    (void)flags;
    CALL(call_enter(__func__, 0));
    initialised++;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlInit_v2(void)
{
    CALL(call_enter(__func__, 0));
    initialised++;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlInit(void)
{
    CALL(call_enter(__func__, 0));
    initialised++;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlShutdown(void)
{
    ENTER();
    initialised--;
    return NVML_SUCCESS;
}
