#include "base/utf8.h"

#include <gtest/gtest.h>

#include <string>

namespace pipedream {
namespace {

const std::string kReplaced = "\xEF\xBF\xBD";

TEST(AsUtf8, LeavesCharactersOfEveryLengthAsTheyAre) {
  const std::string text =
      "a\x7F \xC2\x80 \xC3\xA4 \xE0\xA0\x80 \xED\x9F\xBF \xEF\xBF\xBF \xF0\x9F\x9A\x82 \xF4\x8F\xBF\xBF";
  EXPECT_EQ(as_utf8(text), text);
  EXPECT_EQ(as_utf8(std::string("\0x", 2)), std::string("\0x", 2));
  EXPECT_EQ(as_utf8(""), "");
}

TEST(AsUtf8, ReplacesBytesThatBelongToNoCharacter) {
  EXPECT_EQ(as_utf8("caf\xE9 x"), "caf" + kReplaced + " x");  // 0xE9 is é in Latin-1, not in UTF-8
  EXPECT_EQ(as_utf8("\x80\xFF"), kReplaced + kReplaced);      // neither is the first byte of a character
  // Cut off after three of four bytes.
  EXPECT_EQ(as_utf8("a\xF0\x9F\x9A"), "a" + kReplaced + kReplaced + kReplaced);
  EXPECT_EQ(as_utf8("\xC0\xAF"), kReplaced + kReplaced);                  // '/' in two bytes instead of one
  EXPECT_EQ(as_utf8("\xE0\x80\xAF"), kReplaced + kReplaced + kReplaced);  // '/' in three bytes
  EXPECT_EQ(as_utf8("\xED\xA0\x80"), kReplaced + kReplaced + kReplaced);  // half of a UTF-16 pair
  EXPECT_EQ(as_utf8("\xF4\x90\x80\x80"),
            kReplaced + kReplaced + kReplaced + kReplaced);  // beyond U+10FFFF, the last character
}

}  // namespace
}  // namespace pipedream
