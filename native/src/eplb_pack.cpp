// Packs the copies of experts into the slots of ranks. eplb/reference.py says what it guarantees.
#include <numeric>

#include "eplb.h"

namespace {

constexpr double kFull = 1e300;  // the load of a rank without room

struct Packer {
  int G = 0, S = 0, E = 0;
  std::vector<int> ranks;  // in the order in which ties are decided
  std::vector<int> copies, order, used, links, group, mine, in_domain;
  std::vector<double> quotient, load;
  std::vector<std::pair<double, int>> keys;
  std::vector<char> clash;

  // Ties go to `first`, then to ranks far from each other: what is uneven adds up to even over layers and domains.
  void order_ranks(int64_t first) {
    int64_t stride = std::max<int64_t>(1, G * 5 / 8);
    while (std::gcd(stride, static_cast<int64_t>(G)) > 1) ++stride;
    ranks.resize(G);
    for (int64_t i = 0; i < G; ++i) ranks[i] = static_cast<int>((first + i * stride) % G);
  }

  void add_copy(const double* w, int e) {
    ++copies[e];
    quotient[e] = copies[e] < G ? w[e] / copies[e] : -1.0;
  }

  // Another copy for the greatest load per copy, as long as that is above `target`; returns the slots left.
  int divide(const double* w, int spare, double target) {
    for (; spare > 0; --spare) {
      const int top = static_cast<int>(std::max_element(quotient.begin(), quotient.end()) - quotient.begin());
      if (quotient[top] <= target) break;
      add_copy(w, top);
    }
    return spare;
  }

  void count_copies(const double* w, int min_copies, double theta) {
    copies.assign(E, min_copies);
    quotient.resize(E);
    double total = 0.0;
    for (int e = 0; e < E; ++e) total += w[e], quotient[e] = min_copies < G ? w[e] / min_copies : -1.0;
    int spare = divide(w, G * S - E * min_copies, theta * total / G);
    sort_by(w, false);
    for (int e : order)
      if (spare > 0 && copies[e] == 1 && G > 1) add_copy(w, e), --spare;
    divide(w, spare, -0.5);
  }

  // All experts into `order`, the greatest load (per copy) first.
  void sort_by(const double* w, bool per_copy) {
    order.resize(E), keys.resize(E);
    for (int e = 0; e < E; ++e) keys[e] = {per_copy ? -(w[e] / copies[e]) : -w[e], e};
    std::sort(keys.begin(), keys.end());
    for (int e = 0; e < E; ++e) order[e] = keys[e].second;
  }

  void put(int g, int e, double part, int32_t* ids, int stride) {
    ids[g * stride + used[g]++] = e;
    load[g] += part;
    if (used[g] == S) load[g] = kFull;
  }

  // Another copy for the emptiest rank with room; `distinct` copies of an expert on different ranks.
  void place_lightest(int e, double part, int32_t* ids, int stride, bool distinct) {
    int best = -1;
    double least = kFull;
    for (int g : ranks)
      if (load[g] < least && !(distinct && clash[g])) least = load[g], best = g;
    if (best < 0) return;
    put(best, e, part, ids, stride);
    clash[best] = distinct;
  }

  // Copies of experts with several: as many on each rank as on any other, in a failure domain and among ranks without
  // copies in common with those chosen so far, then on the emptiest.
  void place_links(const double* w, const int32_t* domain, int32_t* ids, int stride) {
    for (int e : order) {
      if (copies[e] < 2) continue;
      mine.clear();
      std::fill(clash.begin(), clash.end(), 0);
      for (int c = 0; c < copies[e]; ++c) {
        int best = -1;
        for (int g : ranks) {
          if (load[g] == kFull || clash[g] >= 4) continue;
          if (best < 0 || links[g] < links[best] ||
              (links[g] == links[best] &&
               (clash[g] < clash[best] || (clash[g] == clash[best] && load[g] < load[best]))))
            best = g;
        }
        if (best < 0) break;
        put(best, e, w[e] / copies[e], ids, stride);
        ++links[best];
        mine.push_back(best);
        for (int g = 0; g < G; ++g) {
          if (domain[g] == domain[best]) clash[g] |= 1;
          if (group[g] == group[best]) clash[g] |= 2;
        }
        clash[best] |= 4;
      }
      for (size_t i = 1; i < mine.size(); ++i) {
        const int from = group[mine[i]], to = group[mine[0]];
        for (int g = 0; g < G; ++g)
          if (group[g] == from) group[g] = to;
      }
    }
  }

  int spread(const int* row) const { return static_cast<int>(std::count_if(row, row + G, [](int n) { return n > 0; })); }

  // An expert whose copies all ended up in one domain changes places with the expert elsewhere that is most like it.
  void cross(const double* w, const int32_t* domain, int32_t* ids, int stride) {
    in_domain.assign(static_cast<size_t>(E) * G, 0);
    for (int g = 0; g < G; ++g)
      for (int s = 0; s < used[g]; ++s) ++in_domain[ids[g * stride + s] * G + domain[g]];
    for (int e = 0; e < E; ++e) {
      int* row = &in_domain[static_cast<size_t>(e) * G];
      if (copies[e] < 2 || spread(row) > 1) continue;
      double least = kFull;
      int from = -1, to = -1;
      for (int g = 0; g < G; ++g) {
        const int at = find(ids + g * stride, used[g], e);
        if (at < 0) continue;
        for (int h = 0; h < G; ++h) {
          if (domain[h] == domain[g]) continue;
          for (int s = 0; s < used[h]; ++s) {
            const int f = ids[h * stride + s];
            const double off = std::fabs(w[f] / copies[f] - w[e] / copies[e]);
            if (off >= least || find(ids + g * stride, used[g], f) >= 0) continue;
            int* other = &in_domain[static_cast<size_t>(f) * G];
            --other[domain[h]], ++other[domain[g]];
            if (copies[f] == 1 || spread(other) > 1) least = off, from = g * stride + at, to = h * stride + s;
            ++other[domain[h]], --other[domain[g]];
          }
        }
      }
      if (from < 0) continue;
      const int f = ids[to], near = domain[from / stride], far = domain[to / stride];
      --row[near], ++row[far];
      --in_domain[static_cast<size_t>(f) * G + far], ++in_domain[static_cast<size_t>(f) * G + near];
      std::swap(ids[from], ids[to]);
    }
  }

  static int find(const int32_t* row, int count, int e) {
    for (int s = 0; s < count; ++s)
      if (row[s] == e) return s;
    return -1;
  }

  void pack(const double* w, int slots, const int32_t* domain, double theta, int min_copies, bool linked, int32_t* ids,
            int stride) {
    S = slots;
    used.assign(G, 0), links.assign(G, 0), load.assign(G, 0.0), clash.assign(G, 0);
    group.resize(G);
    for (int g = 0; g < G; ++g) group[g] = g;
    count_copies(w, min_copies, theta);
    sort_by(w, true);
    if (linked) place_links(w, domain, ids, stride);
    for (int e : order) {
      if (linked && copies[e] > 1) continue;
      if (copies[e] > 1) std::fill(clash.begin(), clash.end(), 0);
      for (int c = 0; c < copies[e]; ++c) place_lightest(e, w[e] / copies[e], ids, stride, copies[e] > 1);
    }
    if (std::any_of(domain, domain + G, [&](int32_t d) { return d != domain[0]; })) cross(w, domain, ids, stride);
  }
};

}  // namespace

// ids int32 [L, G, stride], filled with -1 by the caller; load double [L, E]; slots int64 [L] <= stride; first int64 [L]: the
// rank that ties go to, modulo G; domain int32 [G], 0 <= label < G.
NATIVE_API void eplb_pack(const double* load, const int64_t* slots, const int64_t* first, const int32_t* domain, double theta,
                          int64_t min_copies, int64_t linked, int32_t* ids, int64_t L, int64_t G, int64_t stride, int64_t E) {
  Packer packer;
  packer.G = static_cast<int>(G), packer.E = static_cast<int>(E);
  for (int64_t l = 0; l < L; ++l) {
    packer.order_ranks(first[l]);
    packer.pack(load + l * E, static_cast<int>(slots[l]), domain, theta, static_cast<int>(min_copies), linked != 0,
                ids + l * G * stride, static_cast<int>(stride));
  }
}
