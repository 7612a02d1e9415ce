#define _GNU_SOURCE
#include "double.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define MAX_LINES 256
#define MAX_FUNCTIONS 64

static char lines[MAX_LINES][256];
static int line_count;
static struct timespec seen;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
    char name[64];
    long calls;
} counted[MAX_FUNCTIONS];

const char *own_uuid(void)
{
    const char *uuid = getenv("CUDA_VISIBLE_DEVICES");
    return uuid ? uuid : "";
}

static void refresh(void)
{
    const char *path = getenv("GPUIDLE_CUPTI_SCENARIO");
    struct stat now;
    if (!path || stat(path, &now)) return;
    if (now.st_mtim.tv_sec == seen.tv_sec && now.st_mtim.tv_nsec == seen.tv_nsec) return;
    FILE *file = fopen(path, "r");
    if (!file) return;
    for (line_count = 0; line_count < MAX_LINES && fgets(lines[line_count], sizeof lines[0], file); line_count++)
        lines[line_count][strcspn(lines[line_count], "\n")] = 0;
    fclose(file);
    seen = now.st_mtim;
}

int scenario_text(const char *key, char *out, size_t size)
{
    char first[256], second[256], third[256];
    int found = 0;
    pthread_mutex_lock(&lock);
    refresh();
    for (int i = 0; i < line_count; i++) {
        int words = sscanf(lines[i], "%255s %255s %255s", first, second, third);
        if (words == 2 && !strcmp(first, key) && found < 2) {
            snprintf(out, size, "%s", second);
            found = 1;
        } else if (words == 3 && !strcmp(first, own_uuid()) && !strcmp(second, key)) {
            snprintf(out, size, "%s", third);
            found = 2;
        }
    }
    pthread_mutex_unlock(&lock);
    return found;
}

double scenario_number(const char *key, double otherwise)
{
    char text[256];
    return scenario_text(key, text, sizeof text) ? strtod(text, NULL) : otherwise;
}

void journal(const char *function)
{
    const char *path = getenv("GPUIDLE_CUPTI_JOURNAL");
    char line[160];
    int file = path ? open(path, O_WRONLY | O_APPEND | O_CREAT, 0600) : -1;
    if (file < 0) return;
    int length = snprintf(line, sizeof line, "%d %s\n", (int)getpid(), function);
    if (write(file, line, (size_t)length) < 0) {}
    close(file);
}

static long count_call(const char *function)
{
    for (int i = 0; i < MAX_FUNCTIONS; i++) {
        if (!counted[i].name[0]) snprintf(counted[i].name, sizeof counted[i].name, "%s", function);
        if (!strcmp(counted[i].name, function)) return counted[i].calls++;
    }
    return 0;
}

int fault(const char *function)
{
    char word[256], name[256], code[256], uuid[256];
    long after, calls;
    int result = 0, end = 0;
    pthread_mutex_lock(&lock);
    refresh();
    calls = count_call(function);
    for (int i = 0; i < line_count && !result && !end; i++) {
        uuid[0] = 0;
        if (sscanf(lines[i], "%255s %255s %255s %ld %255s", word, name, code, &after, uuid) < 4) continue;
        if (strcmp(word, "fault") || strcmp(name, function) || calls < after) continue;
        if (uuid[0] && strcmp(uuid, own_uuid())) continue;
        if (!strcmp(code, "hang"))
            end = 1;
        else if (!strcmp(code, "crash"))
            end = 2;
        else
            result = atoi(code);
    }
    pthread_mutex_unlock(&lock);
    if (end == 2) raise(SIGSEGV);
    while (end == 1) pause();
    return result;
}
