/* The same over tcp alone, chosen by the environment: every transfer is in flight for a while. */
/* timeout: 120 */
/* env: UCX_TLS=tcp,self */
#define ROOMS 250
#include "flow_random_rooms.c"
