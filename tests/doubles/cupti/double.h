/* What the doubles of libcupti and libcuda share: a scenario file, read again whenever it changes.
 *
 *   KEY VALUE                        a setting of every device
 *   UUID KEY VALUE                   a setting of one device
 *   fault FUNCTION CODE AFTER [UUID] from the AFTER-th call on, FUNCTION returns CODE; the codes `hang` and
 *                                    `crash` never return and raise SIGSEGV
 */
#ifndef GPUIDLE_CUPTI_DOUBLE_H
#define GPUIDLE_CUPTI_DOUBLE_H

#include <stddef.h>

#define EXPORT __attribute__((visibility("default")))

const char *own_uuid(void); /* of the one visible device: CUDA_VISIBLE_DEVICES */
int scenario_text(const char *key, char *out, size_t size);
double scenario_number(const char *key, double otherwise);
int fault(const char *function); /* 0: none; does not return for `hang` and `crash` */
void journal(const char *function);

#endif
