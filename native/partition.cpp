#include "partition.h"
