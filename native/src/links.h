// Messages between ranks of several machines over TCP connections, sent and received by the thread that computes: nothing runs beside it.
#pragma once
#include "native.h"

struct Links;

// To box `box` of a peer, where the word of that box becomes `value` when all has arrived. body stays as it is until then.
void links_send(Links *links, int64_t peer, int64_t box, const uint8_t *body, int64_t bytes, int64_t value);
// Sends and receives what can be without waiting. True: all that was to be sent is in the kernel's hands.
bool links_go_on(Links *links);
// Until something can be received or sent, at most so long; counted as waited.
void links_sleep(Links *links, int64_t ns);
// The rank whose connection is broken, or -1.
int64_t links_lost(const Links *links);
// So long the caller has waited for messages.
void links_waited(Links *links, int64_t ns);
