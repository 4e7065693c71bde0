// SPDX-License-Identifier: Apache-2.0
// What nearly every file of the core includes, compiled once for each variant; see the Makefile. Each file includes what
// it needs by itself, all the same: elsewhere it is compiled without this.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>
