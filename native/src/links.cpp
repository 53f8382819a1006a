// Connections (links.h). A message is a head and a body; it names the box of its receiver, who has said where the bodies of that box go.
// Both ends have the same boxes, and there is at most one message under way to each.
#include "links.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

enum { LINKS_RANKS = 64, LINKS_BOXES = 256 };

namespace {

struct Head {
  int64_t box, bytes, value;
};

struct Box {
  uint8_t *memory;  // of what arrives
  int64_t room;
  int64_t *word;
  Head head;  // of what is to be sent, or under way
  const uint8_t *body;
  bool unsent;
};

struct Link {
  int fd;  // -1: this rank itself
  int64_t num_boxes, num_unsent;
  Box *boxes;
  int64_t sending, sent;  // the box whose message is on its way, or -1; bytes of it that are gone
  Head coming;            // of the message that arrives
  int64_t got;            // its bytes so far
  bool lost;
};

}  // namespace

struct Links {
  int64_t size, waited;
  Link link[LINKS_RANKS];
};

static bool would_wait() { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

static void send_on(Link *link) {
  while (link->num_unsent && !link->lost) {
    if (link->sending < 0)
      for (link->sending = 0, link->sent = 0; !link->boxes[link->sending].unsent;) link->sending++;
    Box *box = link->boxes + link->sending;
    int64_t all = (int64_t)sizeof(Head) + box->head.bytes, of_body = link->sent - (int64_t)sizeof(Head);
    iovec parts[2];
    int count = 0;
    if (of_body < 0) parts[count++] = {(uint8_t *)&box->head + link->sent, (size_t)-of_body}, of_body = 0;
    if (of_body < box->head.bytes) parts[count++] = {(void *)(box->body + of_body), (size_t)(box->head.bytes - of_body)};
    msghdr message = {};
    message.msg_iov = parts, message.msg_iovlen = count;
    ssize_t n = sendmsg(link->fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n < 0) {
      if (!would_wait()) link->lost = true;
      return;
    }
    link->sent += n;
    if (link->sent < all) return;
    box->unsent = false, link->num_unsent--, link->sending = -1;
  }
}

// At most to the end of a message.
static void receive_on(Link *link) {
  while (!link->lost) {
    int64_t head_bytes = sizeof(Head), of_body = link->got - head_bytes;
    uint8_t *to = (uint8_t *)&link->coming + link->got;
    int64_t wanted = -of_body;
    if (of_body >= 0) {
      const Head *head = &link->coming;
      if (head->box >= link->num_boxes && head->box < LINKS_BOXES) return;  // this rank is about to make it
      if (head->box < 0 || head->box >= LINKS_BOXES || head->bytes < 0 || head->bytes > link->boxes[head->box].room) {
        link->lost = true;
        return;
      }
      Box *box = link->boxes + head->box;
      if (of_body == head->bytes) {
        link->got = 0;
        __atomic_store_n(box->word, head->value, __ATOMIC_RELEASE);
        return;
      }
      to = box->memory + of_body, wanted = head->bytes - of_body;
    }
    ssize_t n = recv(link->fd, to, wanted, MSG_DONTWAIT);
    if (n <= 0) {
      if (n == 0 || !would_wait()) link->lost = true;
      return;
    }
    link->got += n;
    if (n < wanted) return;
  }
}

void links_send(Links *links, int64_t peer, int64_t box_number, const uint8_t *body, int64_t bytes, int64_t value) {
  Link *link = links->link + peer;
  Box *box = link->boxes + box_number;
  box->head = {box_number, bytes, value}, box->body = body;
  if (!box->unsent) link->num_unsent++;
  box->unsent = true;
  send_on(link);
}

bool links_go_on(Links *links) {
  bool sent = true;
  for (Link *link = links->link; link < links->link + links->size; link++) {
    if (link->fd < 0) continue;
    if (link->num_unsent) send_on(link);
    receive_on(link);
    sent &= !link->num_unsent;
  }
  return sent;
}

void links_sleep(Links *links, int64_t ns) {
  pollfd polled[LINKS_RANKS];
  int count = 0;
  for (const Link *link = links->link; link < links->link + links->size; link++)
    if (link->fd >= 0) polled[count++] = {link->fd, (short)(link->num_unsent ? POLLIN | POLLOUT : POLLIN), 0};
  timespec bound = {ns / 1000000000, ns % 1000000000};
  ppoll(polled, count, &bound, nullptr);
}

int64_t links_lost(const Links *links) {
  for (int64_t peer = 0; peer < links->size; peer++)
    if (links->link[peer].lost) return peer;
  return -1;
}

void links_waited(Links *links, int64_t ns) { links->waited += ns; }

// fd [size]: connected sockets by rank, -1 for this one; they stay the caller's.
NATIVE_API void links_new(Links **links, const int *fd, int64_t size) {
  *links = (Links *)calloc(1, sizeof(Links));
  (*links)->size = size;
  for (int64_t peer = 0; peer < size; peer++) {
    Link *link = (*links)->link + peer;
    link->fd = fd[peer], link->sending = -1;
    link->boxes = (Box *)calloc(LINKS_BOXES, sizeof(Box));
  }
}

NATIVE_API void links_free(Links *links) {
  for (int64_t peer = 0; peer < links->size; peer++) free(links->link[peer].boxes);
  free(links);
}

// The next box of a peer: its messages go to memory [room].
NATIVE_API void links_box(Links *links, int64_t peer, uint8_t *memory, int64_t room, int64_t *word) {
  Link *link = links->link + peer;
  Box *box = link->boxes + link->num_boxes++;
  *box = {}, box->memory = memory, box->room = room, box->word = word;
}

// lost: the rank whose connection is broken, or -1. waited: nanoseconds, of all exchanges so far.
NATIVE_API void links_state(const Links *links, int64_t *lost, int64_t *waited) { *lost = links_lost(links), *waited = links->waited; }
