/* The same over tcp alone, chosen by the backend's parameters. */
/* timeout: 120 */
#define ROOMS 150
#define TLS "tcp,self"
#include "flow_random_rooms.c"
