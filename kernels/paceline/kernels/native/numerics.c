#include "numerics.h"

int amx_numerics;

/* Not while a product runs. */
void paceline_set_numerics(int amx) { amx_numerics = amx; }
