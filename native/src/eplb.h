// Balancing of experts: the parts that the files eplb_*.cpp share.
//
// Letters: L layers, G ranks, S slots of a rank, E logical experts, J experts with copies on several ranks.
// Baseline instructions and no -ffast-math: decisions must not depend on the build.
#pragma once
#include "native.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

namespace {

constexpr double kTolerance = 1e-9;  // of the mean rank load

// The copies of one layer: copy c of expert j, j_begin[j] <= c < j_begin[j + 1], is on rank host[c] and takes flow[c].
struct Flows {
  int num_ranks = 0;
  std::vector<int> j_begin{0};
  std::vector<int> host;
  std::vector<double> flow;
  std::vector<double> load;  // of each rank, with these flows

  // Scratch of the exact method.
  std::vector<int> rank_begin, rank_copies, expert_of, reached, came, stamp;
  std::vector<char> open;
  int round = 0;

  void reset(int ranks) {
    num_ranks = ranks;
    j_begin.assign(1, 0);
    host.clear();
    flow.clear();
    load.assign(ranks, 0.0);
  }
  int num_experts() const { return static_cast<int>(j_begin.size()) - 1; }

  double tolerance() const {
    double total = 0.0;
    for (double x : load) total += x;
    return kTolerance * total / num_ranks;
  }

  void index() {
    const int copies = static_cast<int>(host.size());
    expert_of.resize(copies);
    rank_begin.assign(num_ranks + 1, 0);
    for (int j = 0; j < num_experts(); ++j)
      for (int c = j_begin[j]; c < j_begin[j + 1]; ++c) expert_of[c] = j, ++rank_begin[host[c] + 1];
    for (int g = 0; g < num_ranks; ++g) rank_begin[g + 1] += rank_begin[g];
    rank_copies.resize(copies);
    std::vector<int>& next = came;
    next.assign(rank_begin.begin(), rank_begin.end() - 1);
    for (int c = 0; c < copies; ++c) rank_copies[next[host[c]]++] = c;
    stamp.assign(num_ranks, 0);
    came.assign(2 * num_ranks, -1);
    round = 0;
  }

  // The open ranks that `start` can give load to, in `reached`, itself first.
  void reach(int start, double eps) {
    ++round;
    reached.assign(1, start);
    stamp[start] = round;
    for (size_t i = 0; i < reached.size(); ++i) {
      const int g = reached[i];
      for (int k = rank_begin[g]; k < rank_begin[g + 1]; ++k) {
        const int c = rank_copies[k];
        if (flow[c] <= eps) continue;
        const int j = expert_of[c];
        for (int o = j_begin[j]; o < j_begin[j + 1]; ++o) {
          const int other = host[o];
          if (open[other] && stamp[other] != round) stamp[other] = round, reached.push_back(other);
        }
      }
    }
  }

  // Send load from `start` along a shortest path to a rank below the target; false when there is none.
  bool push(int start, double target, double eps, std::vector<int>& queue) {
    ++round;
    queue.assign(1, start);
    stamp[start] = round;
    came[2 * start] = -1;
    int end = -1;
    for (size_t i = 0; i < queue.size(); ++i) {
      const int g = queue[i];
      if (target - load[g] > eps) {
        end = g;
        break;
      }
      for (int k = rank_begin[g]; k < rank_begin[g + 1]; ++k) {
        const int c = rank_copies[k];
        if (flow[c] <= eps) continue;
        const int j = expert_of[c];
        for (int o = j_begin[j]; o < j_begin[j + 1]; ++o) {
          const int other = host[o];
          if (!open[other] || stamp[other] == round) continue;
          stamp[other] = round;
          came[2 * other] = c, came[2 * other + 1] = o;
          queue.push_back(other);
        }
      }
    }
    if (end < 0) return false;
    double amount = std::min(load[start] - target, target - load[end]);
    for (int g = end; came[2 * g] >= 0; g = host[came[2 * g]]) amount = std::min(amount, flow[came[2 * g]]);
    for (int g = end; came[2 * g] >= 0; g = host[came[2 * g]]) {
      flow[came[2 * g]] -= amount;
      flow[came[2 * g + 1]] += amount;
    }
    load[start] -= amount;
    load[end] += amount;
    return true;
  }

  // Level the set that the fullest rank can give load to; where it stays uneven it splits.
  void solve() {
    const double eps = tolerance();
    index();
    open.assign(num_ranks, 0);
    int left = 0;
    for (int g = 0; g < num_ranks; ++g)
      if (rank_begin[g + 1] > rank_begin[g]) open[g] = 1, ++left;
    std::vector<int> queue;
    while (left > 0) {
      int top = -1;
      for (int g = 0; g < num_ranks; ++g)
        if (open[g] && (top < 0 || load[g] > load[top])) top = g;
      reach(top, eps);
      double total = 0.0;
      for (int g : reached) total += load[g];
      const double target = total / reached.size();
      bool moved = false, level = true;
      for (int g : reached) {
        while (load[g] - target > eps && push(g, target, eps, queue)) moved = true;
        level = level && load[g] - target <= eps;
      }
      // A fuller rank may have stayed outside, which could give load to this set: then it must stay open.
      for (int g = 0; g < num_ranks; ++g) level = level && !(open[g] && load[g] - target > eps);
      if (level || !moved) {
        for (int g : reached) open[g] = 0;
        left -= static_cast<int>(reached.size());
      }
    }
  }

};

// The live ranks of each expert of one layer, each with the first slot that it has of it.
struct Hosts {
  std::vector<int> begin, slot;  // slots (rank * S + slot) of expert e: slot[begin[e]] .. slot[begin[e + 1] - 1]
  std::vector<int> seen;

  // Returns the first expert without a live slot, or -1.
  int build(const int32_t* ids, const uint8_t* alive, int G, int S, int E) {
    begin.assign(E + 1, 0);
    seen.assign(E, -1);
    for (int g = 0; g < G; ++g)
      if (alive[g])
        for (int s = 0; s < S; ++s) {
          const int e = ids[g * S + s];
          if (e >= 0 && seen[e] != g) seen[e] = g, ++begin[e + 1];
        }
    for (int e = 0; e < E; ++e) {
      if (begin[e + 1] == 0) return e;
      begin[e + 1] += begin[e];
    }
    slot.resize(begin[E]);
    std::fill(seen.begin(), seen.end(), -1);
    std::vector<int>& at = next;
    at.assign(begin.begin(), begin.end() - 1);
    for (int g = 0; g < G; ++g)
      if (alive[g])
        for (int s = 0; s < S; ++s) {
          const int e = ids[g * S + s];
          if (e >= 0 && seen[e] != g) seen[e] = g, slot[at[e]++] = g * S + s;
        }
    return -1;
  }
  std::vector<int> next;
};

}  // namespace
