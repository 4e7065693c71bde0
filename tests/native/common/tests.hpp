// SPDX-License-Identifier: Apache-2.0
// As core.hpp, for the tests.
#pragma once

#include <doctest/doctest.h>

#include <random>
#include <thread>

#include "common/core.hpp"
