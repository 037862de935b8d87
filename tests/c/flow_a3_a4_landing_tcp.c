/* The same over tcp alone, where the data and the word that it has landed could overtake each other. */
/* timeout: 180 */
/* env: UCX_TLS=tcp,self */
#define ITERATIONS 150
#include "flow_a3_a4_landing.c"
