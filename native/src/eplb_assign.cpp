// Renaming ranks so that as much as can be stays where it is. eplb/reference.py says what it guarantees.
#include "eplb.h"

namespace {

// The assignment of greatest value: Hungarian method by shortest augmenting paths.
struct Assignment {
  std::vector<double> of_row, of_column, least;
  std::vector<int> row_of, came, visited;
  std::vector<char> done;

  // value [n, n]; columns [n]: the column of each row.
  void solve(const std::vector<double>& value, int n, int* columns) {
    const double most = n ? std::max(0.0, *std::max_element(value.begin(), value.begin() + n * n)) : 0.0;
    of_row.assign(n, 0.0), of_column.assign(n + 1, 0.0), least.resize(n), row_of.assign(n + 1, -1), came.resize(n);
    for (int row = 0; row < n; ++row) {
      row_of[n] = row;
      int column = n;
      std::fill(least.begin(), least.end(), HUGE_VAL);
      std::fill(came.begin(), came.end(), n);
      done.assign(n + 1, 0);
      visited.clear();
      while (row_of[column] >= 0) {
        done[column] = 1;
        visited.push_back(column);
        const int current = row_of[column];
        int following = -1;
        for (int k = 0; k < n; ++k) {
          if (done[k]) continue;
          const double through = (most - value[current * n + k]) - of_row[current] - of_column[k];
          if (through < least[k]) least[k] = through, came[k] = column;
          if (following < 0 || least[k] < least[following]) following = k;
        }
        const double delta = least[following];
        for (int k : visited) of_row[row_of[k]] += delta, of_column[k] -= delta;
        for (int k = 0; k < n; ++k)
          if (!done[k]) least[k] -= delta;
        column = following;
      }
      for (; column != n; column = came[column]) row_of[column] = row_of[came[column]];
    }
    for (int k = 0; k < n; ++k) columns[row_of[k]] = k;
  }
};

struct Relabeller {
  int G, S, E;
  std::vector<std::vector<int>> groups;
  Assignment assignment;
  std::vector<int> mark, target, outer, rest;
  std::vector<double> keep, block, total;
  std::vector<std::vector<int>> inner;

  // keep[g, h]: different experts that rank g of the plan and rank h of before have in common.
  void count_kept(const int32_t* now, const int32_t* before) {
    keep.assign(static_cast<size_t>(G) * G, 0.0);
    mark.assign(E, -1);
    for (int g = 0; g < G; ++g) {
      for (int s = 0; s < S; ++s)
        if (now[g * S + s] >= 0) mark[now[g * S + s]] = 2 * g;
      for (int h = 0; h < G; ++h) {
        int common = 0;
        for (int s = 0; s < S; ++s) {
          const int e = before[h * S + s];
          if (e >= 0 && mark[e] == 2 * g) ++common, mark[e] = 2 * g + 1;
        }
        for (int s = 0; s < S; ++s) {
          const int e = before[h * S + s];
          if (e >= 0 && mark[e] == 2 * g + 1) mark[e] = 2 * g;
        }
        keep[g * G + h] = common;
      }
      for (int s = 0; s < S; ++s)
        if (now[g * S + s] >= 0) mark[now[g * S + s]] = -1;
    }
  }

  // target[g]: the rank that gets the contents of rank g. A group's ranks go to one group of the same size.
  void rename() {
    const int n = static_cast<int>(groups.size());
    total.assign(static_cast<size_t>(n) * n, -1e9);
    inner.assign(static_cast<size_t>(n) * n, {});
    for (int i = 0; i < n; ++i)
      for (int j = 0; j < n; ++j) {
        const std::vector<int>&from = groups[i], &to = groups[j];
        const int size = static_cast<int>(from.size());
        if (from.size() != to.size()) continue;
        block.resize(static_cast<size_t>(size) * size);
        for (int a = 0; a < size; ++a)
          for (int b = 0; b < size; ++b) block[a * size + b] = keep[from[a] * G + to[b]];
        std::vector<int>& columns = inner[i * n + j];
        columns.resize(size);
        assignment.solve(block, size, columns.data());
        double sum = 0.0;
        for (int a = 0; a < size; ++a) sum += block[a * size + columns[a]];
        total[i * n + j] = sum;
      }
    outer.resize(n);
    assignment.solve(total, n, outer.data());
    target.assign(G, -1);
    for (int i = 0; i < n; ++i)
      for (size_t a = 0; a < groups[i].size(); ++a)
        target[groups[i][a]] = groups[outer[i]][inner[i * n + outer[i]][a]];
  }

  // The new contents with every expert that was there before in a slot that it had.
  void align(const int32_t* now, const int32_t* before, int32_t* out) {
    rest.assign(now, now + S);
    std::fill(out, out + S, -1);
    for (int s = 0; s < S; ++s) {
      if (before[s] < 0) continue;
      const auto found = std::find(rest.begin(), rest.end(), before[s]);
      if (found != rest.end()) out[s] = before[s], rest.erase(found);
    }
    rest.erase(std::remove_if(rest.begin(), rest.end(), [](int e) { return e < 0; }), rest.end());
    size_t next = 0;
    for (int s = 0; s < S && next < rest.size(); ++s)
      if (out[s] < 0) out[s] = rest[next++];
  }
};

}  // namespace

// now, before, out int32 [L, G, S]; group int32 [G]: the ranks that may be renamed among each other, -1 for a rank that keeps
// what it has in `out` already; groups are numbered from 0 without gaps.
NATIVE_API void eplb_relabel(const int32_t* now, const int32_t* before, const int32_t* group, int32_t* out, int64_t L, int64_t G,
                             int64_t S, int64_t E) {
  Relabeller relabeller;
  relabeller.G = static_cast<int>(G), relabeller.S = static_cast<int>(S), relabeller.E = static_cast<int>(E);
  for (int g = 0; g < static_cast<int>(G); ++g) {
    if (group[g] < 0) continue;
    if (static_cast<size_t>(group[g]) >= relabeller.groups.size()) relabeller.groups.resize(group[g] + 1);
    relabeller.groups[group[g]].push_back(g);
  }
  for (int64_t l = 0; l < L; ++l) {
    const int64_t at = l * G * S;
    relabeller.count_kept(now + at, before + at);
    relabeller.rename();
    for (int64_t g = 0; g < G; ++g) {
      const int64_t to = relabeller.target[g];
      if (to >= 0) relabeller.align(now + at + g * S, before + at + to * S, out + at + to * S);
    }
  }
}
