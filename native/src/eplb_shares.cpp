// Exact min-max shares of all layers. eplb/reference.py says what it guarantees.
#include "eplb.h"

namespace {

void reweight_layer(const Hosts& hosts, const double* load, int G, int S, int E, Flows& flows,
          std::vector<int>& experts, float* share) {
  flows.reset(G);
  experts.clear();
  for (int e = 0; e < E; ++e) {
    const int begin = hosts.begin[e], count = hosts.begin[e + 1] - begin;
    if (count == 1) {
      share[hosts.slot[begin]] = 1.0f;
      flows.load[hosts.slot[begin] / S] += load[e];
      continue;
    }
    for (int m = 0; m < count; ++m) {
      const int slot = hosts.slot[begin + m];
      const double part = load[e] / count;
      flows.load[slot / S] += part;
      if (load[e] > 0) {
        flows.host.push_back(slot / S);
        flows.flow.push_back(part);
      } else {
        share[slot] = 1.0f / count;
      }
    }
    if (load[e] > 0) {
      flows.j_begin.push_back(static_cast<int>(flows.host.size()));
      experts.push_back(e);
    }
  }
  flows.solve();
  for (size_t j = 0; j < experts.size(); ++j) {
    const int begin = flows.j_begin[j], count = flows.j_begin[j + 1] - begin;
    double total = 0.0;
    for (int m = 0; m < count; ++m) total += flows.flow[begin + m];
    for (int m = 0; m < count; ++m)
      share[hosts.slot[hosts.begin[experts[j]] + m]] = static_cast<float>(flows.flow[begin + m] / total);
  }
}

}  // namespace

// Shares of L layers: ids int32 [L, G, S], load double [L, E], alive uint8 [G], share float [L, G, S] (zeroed by the
// caller). missing: set to layer * E + expert of the first expert without a live slot, if any.
NATIVE_API void eplb_reweight(const int32_t* ids, const double* load, const uint8_t* alive, float* share,
                              int64_t* missing, int64_t L, int64_t G, int64_t S, int64_t E) {
  Hosts hosts;
  Flows flows;
  std::vector<int> experts;
  const int64_t slots = G * S;
  for (int64_t l = 0; l < L; ++l) {
    const int without = hosts.build(ids + l * slots, alive, static_cast<int>(G), static_cast<int>(S), static_cast<int>(E));
    if (without >= 0) {
      *missing = l * E + without;
      return;
    }
    reweight_layer(hosts, load + l * E, static_cast<int>(G), static_cast<int>(S), static_cast<int>(E), flows, experts, share + l * slots);
  }
}
