/* A double of PM sampling and the profiler host API of libcupti.
 *
 * Samples come in real time from a square wave: `wave_period_ns`, of which a share `wave_duty` is high. Every
 * metric has a level `high.NAME` and `low.NAME`; NAME is gr, sm, issue, tensor, read, write or clock. A sample's
 * value is the exact mean over its interval, so that a test knows what must be read. CUPTI's clock is
 * CLOCK_MONOTONIC plus `clock_offset_ns`, running fast by `clock_drift_ppm`.
 *
 * It holds its caller to the rules: calls in order, sizes right, the configuration image alive and unchanged, one
 * session a device and node (by a file lock in `lock_folder`), one de-initialisation.
 */
#define _GNU_SOURCE
#include "double.h"

#include <cuda.h>
#include <cupti_result.h>
#include <cupti_target.h>
#include <cupti_profiler_target.h>
#include <cupti_profiler_host.h>
#include <cupti_pmsampling.h>
#include <cupti_version.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <time.h>
#include <unistd.h>

#define MAX_METRICS 32
#define CONFIG_SIZE 512
#define CONFIG_MARK 0x6770756964ULL
#define RECORD_BYTES 4096 /* of hardware buffer that a sample takes */

struct CUpti_Profiler_Host_Object {
    int metrics;
};
struct CUpti_PmSampling_Object {
    int lock;
    const uint8_t *config;
    uint64_t interval_ns;
    uint64_t buffer_samples;
    int keep_latest;
    int started;
    uint64_t next; /* start of the next record, in CUPTI's clock */
    long first;
};
struct image {
    uint64_t mark, slots, count, populated;
    struct {
        uint64_t start, end; /* as told */
        uint64_t from, to;   /* as they are */
    } row[];
};

static int profiler_up, deinitialised, known_names;
static char chip[64];
static char names[MAX_METRICS][128];
static int kinds[MAX_METRICS];
static struct {
    double high[7], low[7], period, duty;
} wave;
static long decodes, samples;

#define SIZED(params, type) \
    if (!(params) || (params)->structSize != type##_STRUCT_SIZE || (params)->pPriv) return CUPTI_ERROR_INVALID_PARAMETER
#define FAULTS() \
    do { \
        int code_ = fault(__func__); \
        if (code_) return code_; \
    } while (0)

static uint64_t monotonic(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000ULL + (uint64_t)now.tv_nsec;
}

static int64_t clock_offset;
static double clock_rate;

static uint64_t cupti_now(void)
{
    static int read_once;
    if (!read_once || decodes % 2 == 0) {
        clock_offset = (int64_t)scenario_number("clock_offset_ns", 0);
        clock_rate = scenario_number("clock_drift_ppm", 0) * 1e-6;
        read_once = 1;
    }
    uint64_t now = monotonic();
    return now + clock_offset + (int64_t)((double)now * clock_rate);
}

/* The moment of CLOCK_MONOTONIC at which CUPTI's clock shows `time`. */
static double monotonic_at(uint64_t time)
{
    return (double)(int64_t)(time - (uint64_t)clock_offset) / (1 + clock_rate);
}

EXPORT CUptiResult CUPTIAPI cuptiGetVersion(uint32_t *version)
{
    *version = CUPTI_API_VERSION;
    return fault(__func__);
}

EXPORT CUptiResult CUPTIAPI cuptiGetTimestamp(uint64_t *timestamp)
{
    *timestamp = cupti_now();
    return fault(__func__);
}

EXPORT CUptiResult CUPTIAPI cuptiGetResultString(CUptiResult result, const char **text)
{
    *text = result == 7    ? "CUPTI_ERROR_INVALID_OPERATION"
            : result == 35 ? "CUPTI_ERROR_INSUFFICIENT_PRIVILEGES"
            : result == 27 ? "CUPTI_ERROR_NOT_SUPPORTED"
                           : "CUPTI_ERROR";
    return CUPTI_SUCCESS;
}

EXPORT CUptiResult CUPTIAPI cuptiProfilerInitialize(CUpti_Profiler_Initialize_Params *p)
{
    SIZED(p, CUpti_Profiler_Initialize_Params);
    FAULTS();
    profiler_up = 1;
    return CUPTI_SUCCESS;
}

EXPORT CUptiResult CUPTIAPI cuptiProfilerDeInitialize(CUpti_Profiler_DeInitialize_Params *p)
{
    SIZED(p, CUpti_Profiler_DeInitialize_Params);
    journal(__func__);
    if (deinitialised++) abort(); /* as the library does */
    profiler_up = 0;
    return fault(__func__);
}

EXPORT CUptiResult CUPTIAPI cuptiDeviceGetChipName(CUpti_Device_GetChipName_Params *p)
{
    SIZED(p, CUpti_Device_GetChipName_Params);
    if (!profiler_up) abort();
    FAULTS();
    if (!scenario_text("chip", chip, sizeof chip)) strcpy(chip, "GH100");
    p->pChipName = chip;
    return CUPTI_SUCCESS;
}

EXPORT CUptiResult CUPTIAPI cuptiProfilerHostInitialize(CUpti_Profiler_Host_Initialize_Params *p)
{
    SIZED(p, CUpti_Profiler_Host_Initialize_Params);
    if (p->profilerType != CUPTI_PROFILER_TYPE_PM_SAMPLING) return CUPTI_ERROR_INVALID_PARAMETER;
    FAULTS();
    p->pHostObject = calloc(1, sizeof *p->pHostObject);
    return CUPTI_SUCCESS;
}

EXPORT CUptiResult CUPTIAPI cuptiProfilerHostDeinitialize(CUpti_Profiler_Host_Deinitialize_Params *p)
{
    SIZED(p, CUpti_Profiler_Host_Deinitialize_Params);
    journal(__func__);
    free(p->pHostObject);
    return fault(__func__);
}

static int kind_of(const char *name)
{
    static const char *const parts[] = {"gr__cycles_active", "sm__cycles_active", "sm__inst_executed", "sm__pipe_",
                                        "dram__bytes_",      "dram__bytes_",      "sm__cycles_elapsed"};
    for (int kind = 0; kind < 7; kind++) {
        if (strncmp(name, parts[kind], strlen(parts[kind]))) continue;
        if (kind == 4 || kind == 5) return strstr(name, "write") ? 5 : 4;
        return kind;
    }
    return -1;
}

EXPORT CUptiResult CUPTIAPI cuptiProfilerHostConfigAddMetrics(CUpti_Profiler_Host_ConfigAddMetrics_Params *p)
{
    SIZED(p, CUpti_Profiler_Host_ConfigAddMetrics_Params);
    FAULTS();
    for (size_t i = 0; i < p->numMetrics; i++) {
        int kind = kind_of(p->ppMetricNames[i]);
        if (kind < 0 || p->numMetrics > MAX_METRICS) return CUPTI_ERROR_INVALID_METRIC_NAME;
        snprintf(names[i], sizeof names[i], "%s", p->ppMetricNames[i]);
        kinds[i] = kind;
    }
    p->pHostObject->metrics = known_names = (int)p->numMetrics;
    return CUPTI_SUCCESS;
}

EXPORT CUptiResult CUPTIAPI cuptiProfilerHostGetConfigImageSize(CUpti_Profiler_Host_GetConfigImageSize_Params *p)
{
    SIZED(p, CUpti_Profiler_Host_GetConfigImageSize_Params);
    p->configImageSize = CONFIG_SIZE;
    return fault(__func__);
}

EXPORT CUptiResult CUPTIAPI cuptiProfilerHostGetConfigImage(CUpti_Profiler_Host_GetConfigImage_Params *p)
{
    SIZED(p, CUpti_Profiler_Host_GetConfigImage_Params);
    if (p->configImageSize < CONFIG_SIZE) return CUPTI_ERROR_PARAMETER_SIZE_NOT_SUFFICIENT;
    for (size_t i = 0; i < CONFIG_SIZE / 8; i++) ((uint64_t *)p->pConfigImage)[i] = CONFIG_MARK + i;
    return fault(__func__);
}

static int config_intact(const uint8_t *config)
{
    for (size_t i = 0; i < CONFIG_SIZE / 8; i++)
        if (((const uint64_t *)config)[i] != CONFIG_MARK + i) return 0;
    return 1;
}

EXPORT CUptiResult CUPTIAPI cuptiProfilerHostGetNumOfPasses(CUpti_Profiler_Host_GetNumOfPasses_Params *p)
{
    SIZED(p, CUpti_Profiler_Host_GetNumOfPasses_Params);
    p->numOfPasses = (size_t)scenario_number("passes", 1);
    return fault(__func__);
}

EXPORT CUptiResult CUPTIAPI cuptiPmSamplingEnable(CUpti_PmSampling_Enable_Params *p)
{
    char folder[200], path[512];
    SIZED(p, CUpti_PmSampling_Enable_Params);
    journal(__func__);
    FAULTS();
    if (p->deviceIndex) return CUPTI_ERROR_INVALID_PARAMETER;
    struct CUpti_PmSampling_Object *pm = calloc(1, sizeof *pm);
    pm->lock = -1;
    if (scenario_text("lock_folder", folder, sizeof folder)) {
        snprintf(path, sizeof path, "%s/%s.lock", folder, own_uuid());
        pm->lock = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
        if (pm->lock < 0 || flock(pm->lock, LOCK_EX | LOCK_NB)) {
            close(pm->lock);
            free(pm);
            return CUPTI_ERROR_INVALID_OPERATION;
        }
    }
    p->pPmSamplingObject = pm;
    return CUPTI_SUCCESS;
}

EXPORT CUptiResult CUPTIAPI cuptiPmSamplingSetConfig(CUpti_PmSampling_SetConfig_Params *p)
{
    SIZED(p, CUpti_PmSampling_SetConfig_Params);
    FAULTS();
    if (scenario_number("passes", 1) != 1) return CUPTI_ERROR_NOT_SUPPORTED;
    int turing = chip[0] == 'T', ga100 = !strcmp(chip, "GA100");
    int by_time = p->triggerMode == CUPTI_PM_SAMPLING_TRIGGER_MODE_GPU_TIME_INTERVAL;
    p->pPmSamplingObject->keep_latest = p->hwBufferAppendMode == CUPTI_PM_SAMPLING_HARDWARE_BUFFER_APPEND_MODE_KEEP_LATEST;
    if (by_time && (turing || ga100)) return CUPTI_ERROR_NOT_SUPPORTED;
    if (p->pPmSamplingObject->keep_latest && turing) return CUPTI_ERROR_NOT_SUPPORTED;
    if (p->configSize != CONFIG_SIZE || !config_intact(p->pConfig)) return CUPTI_ERROR_INVALID_PARAMETER;
    double ghz = scenario_number("sys_clock_hz", 1.2e9) / 1e9;
    p->pPmSamplingObject->config = p->pConfig;
    p->pPmSamplingObject->interval_ns = by_time ? p->samplingInterval : (uint64_t)((double)p->samplingInterval / ghz);
    p->pPmSamplingObject->buffer_samples = p->hardwareBufferSize / RECORD_BYTES;
    return CUPTI_SUCCESS;
}

EXPORT CUptiResult CUPTIAPI cuptiPmSamplingGetCounterDataSize(CUpti_PmSampling_GetCounterDataSize_Params *p)
{
    SIZED(p, CUpti_PmSampling_GetCounterDataSize_Params);
    FAULTS();
    if ((int)p->numMetrics != known_names) return CUPTI_ERROR_INVALID_PARAMETER;
    struct image *image = NULL;
    p->counterDataSize = sizeof *image + p->maxSamples * sizeof image->row[0];
    return CUPTI_SUCCESS;
}

EXPORT CUptiResult CUPTIAPI cuptiPmSamplingCounterDataImageInitialize(CUpti_PmSampling_CounterDataImage_Initialize_Params *p)
{
    SIZED(p, CUpti_PmSampling_CounterDataImage_Initialize_Params);
    FAULTS();
    struct image *image = (struct image *)p->pCounterData;
    memset(image, 0, p->counterDataSize);
    image->mark = CONFIG_MARK;
    image->slots = (p->counterDataSize - sizeof *image) / sizeof image->row[0];
    return CUPTI_SUCCESS;
}

EXPORT CUptiResult CUPTIAPI cuptiPmSamplingStart(CUpti_PmSampling_Start_Params *p)
{
    SIZED(p, CUpti_PmSampling_Start_Params);
    journal(__func__);
    FAULTS();
    if (p->pPmSamplingObject->started || !p->pPmSamplingObject->config) return CUPTI_ERROR_INVALID_OPERATION;
    p->pPmSamplingObject->started = 1;
    p->pPmSamplingObject->first = 1;
    p->pPmSamplingObject->next = cupti_now();
    return CUPTI_SUCCESS;
}

EXPORT CUptiResult CUPTIAPI cuptiPmSamplingStop(CUpti_PmSampling_Stop_Params *p)
{
    SIZED(p, CUpti_PmSampling_Stop_Params);
    journal(__func__);
    FAULTS();
    if (!p->pPmSamplingObject->started) return CUPTI_ERROR_INVALID_OPERATION;
    p->pPmSamplingObject->started = 0;
    return CUPTI_SUCCESS;
}

EXPORT CUptiResult CUPTIAPI cuptiPmSamplingDisable(CUpti_PmSampling_Disable_Params *p)
{
    SIZED(p, CUpti_PmSampling_Disable_Params);
    journal(__func__);
    FAULTS();
    if (p->pPmSamplingObject->lock >= 0) close(p->pPmSamplingObject->lock);
    free(p->pPmSamplingObject);
    return CUPTI_SUCCESS;
}

static void read_wave(void)
{
    static const char *const kind[] = {"gr", "sm", "issue", "tensor", "read", "write", "clock"};
    static const double usual[] = {95, 90, 20, 40, 2e12, 1e11, 1.7e9};
    char key[32];
    for (int i = 0; i < 7; i++) {
        snprintf(key, sizeof key, "high.%s", kind[i]);
        wave.high[i] = scenario_number(key, usual[i]);
        snprintf(key, sizeof key, "low.%s", kind[i]);
        wave.low[i] = scenario_number(key, i == 6 ? usual[i] : 0);
    }
    wave.period = scenario_number("wave_period_ns", 20e6);
    wave.duty = scenario_number("wave_duty", 0.5);
}

EXPORT CUptiResult CUPTIAPI cuptiPmSamplingDecodeData(CUpti_PmSampling_DecodeData_Params *p)
{
    SIZED(p, CUpti_PmSampling_DecodeData_Params);
    FAULTS();
    struct CUpti_PmSampling_Object *pm = p->pPmSamplingObject;
    struct image *image = (struct image *)p->pCounterDataImage;
    if (!config_intact(pm->config) || image->mark != CONFIG_MARK) return CUPTI_ERROR_INVALID_PARAMETER;
    if (!pm->started) return CUPTI_ERROR_INVALID_OPERATION;
    if (decodes++ % 2 == 0) read_wave();
    long overflow_at = (long)scenario_number("overflow_at", 0);
    long bad_every = (long)scenario_number("bad_every", 0);
    uint64_t now = cupti_now(), waiting = (now - pm->next) / pm->interval_ns;
    p->overflow = 0;
    if (waiting > pm->buffer_samples) {
        if (pm->keep_latest)
            pm->next += (waiting - pm->buffer_samples) * pm->interval_ns;
        else
            p->overflow = 1;
    }
    if (overflow_at && decodes == overflow_at) p->overflow = 1;
    while (image->count < image->slots && pm->next + pm->interval_ns <= now) {
        uint64_t start = pm->next, end = start + pm->interval_ns;
        image->row[image->count].from = image->row[image->count].start = start;
        image->row[image->count].to = image->row[image->count].end = end;
        if (pm->first) image->row[image->count].start = 0;
        if (bad_every && ++samples % bad_every == 0) {
            if (samples / bad_every % 2)
                image->row[image->count].end = start - pm->interval_ns; /* end < start */
            else
                image->row[image->count].end = end + 3600000000000ULL; /* an hour long */
        }
        pm->first = 0;
        pm->next = end;
        image->count++;
    }
    p->decodeStopReason = image->count == image->slots ? CUPTI_PM_SAMPLING_DECODE_STOP_REASON_COUNTER_DATA_FULL
                                                       : CUPTI_PM_SAMPLING_DECODE_STOP_REASON_END_OF_RECORDS;
    return CUPTI_SUCCESS;
}

EXPORT CUptiResult CUPTIAPI cuptiPmSamplingGetCounterDataInfo(CUpti_PmSampling_GetCounterDataInfo_Params *p)
{
    SIZED(p, CUpti_PmSampling_GetCounterDataInfo_Params);
    const struct image *image = (const struct image *)p->pCounterDataImage;
    p->numTotalSamples = image->slots;
    p->numPopulatedSamples = p->numCompletedSamples = image->count;
    return fault(__func__);
}

EXPORT CUptiResult CUPTIAPI cuptiPmSamplingCounterDataGetSampleInfo(CUpti_PmSampling_CounterData_GetSampleInfo_Params *p)
{
    SIZED(p, CUpti_PmSampling_CounterData_GetSampleInfo_Params);
    const struct image *image = (const struct image *)p->pCounterDataImage;
    if (p->sampleIndex >= image->count) return CUPTI_ERROR_INVALID_PARAMETER;
    p->startTimestamp = image->row[p->sampleIndex].start;
    p->endTimestamp = image->row[p->sampleIndex].end;
    return CUPTI_SUCCESS;
}

/* Time of [0, t) in which the wave is high. */
static double high_until(double t)
{
    double whole = floor(t / wave.period), rest = t - whole * wave.period;
    return whole * wave.period * wave.duty + fmin(rest, wave.period * wave.duty);
}

EXPORT CUptiResult CUPTIAPI cuptiProfilerHostEvaluateToGpuValues(CUpti_Profiler_Host_EvaluateToGpuValues_Params *p)
{
    SIZED(p, CUpti_Profiler_Host_EvaluateToGpuValues_Params);
    const struct image *image = (const struct image *)p->pCounterDataImage;
    if (p->rangeIndex >= image->count || (int)p->numMetrics != known_names) return CUPTI_ERROR_INVALID_PARAMETER;
    double from = monotonic_at(image->row[p->rangeIndex].from), to = monotonic_at(image->row[p->rangeIndex].to);
    double high = (high_until(to) - high_until(from)) / (to - from);
    for (size_t i = 0; i < p->numMetrics; i++)
        p->pMetricValues[i] = wave.low[kinds[i]] + (wave.high[kinds[i]] - wave.low[kinds[i]]) * high;
    return CUPTI_SUCCESS;
}
