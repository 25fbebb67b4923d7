#include "transport/zmq/token.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

#include "base/failure.h"
#include "base/random_text.h"
#include "transport/endpoint.h"

namespace pipedream {
namespace {

TEST(Token, IsReadInAnEndpointAndNeverMadeTwice) {
  constexpr int kNumTokens = 1000;
  std::set<std::string> tokens;
  for (int index = 0; index < kNumTokens; ++index) {
    const std::string token = random_hex(kTokenChars);
    EXPECT_EQ(parse_endpoint("tcp://127.0.0.1:1 token=" + token).token, token);
    tokens.insert(token);
  }
  EXPECT_EQ(tokens.size(), kNumTokens);
}

TEST(Token, EveryDigitCounts) {
  const std::string token = random_hex(kTokenChars);
  EXPECT_TRUE(is_same_token(token, token));
  for (std::size_t index = 0; index < token.size(); ++index) {
    std::string other = token;
    other[index] = other[index] == 'f' ? '0' : 'f';
    EXPECT_FALSE(is_same_token(other, token)) << index;
  }
  EXPECT_FALSE(is_same_token("", token));
  EXPECT_FALSE(is_same_token(token.substr(1), token));
  EXPECT_FALSE(is_same_token(token + token.front(), token));
}

TEST(Token, ThatIsMissingIsNamedWithItsAddress) {
  EXPECT_NO_THROW(check_token(random_hex(kTokenChars), "tcp://127.0.0.1:1"));
  EXPECT_THROW(check_token("", "tcp://127.0.0.1:1"), UserError);
}

}  // namespace
}  // namespace pipedream
